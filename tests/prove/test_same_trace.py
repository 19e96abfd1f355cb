from __future__ import annotations

import json

import pytest

from paralign.prove.same_trace import same_numbers


@pytest.fixture
def traces(tmp_path):
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rank00000.safetensors").write_bytes(b"numbers")
        index = {"trace_id": name, "scalars": [{"kind": "loss", "value": 1.0}]}
        (folder / "rank00000.json").write_text(json.dumps(index))
    return tmp_path / "first", tmp_path / "second"


def test_only_the_name_of_the_recording_may_differ(traces):
    assert same_numbers(*traces)


def test_another_bit_another_number_or_another_file_tells(traces):
    first, second = traces
    (second / "rank00000.safetensors").write_bytes(b"numbert")
    assert not same_numbers(first, second)
    (second / "rank00000.safetensors").write_bytes(b"numbers")
    index = {"trace_id": "second", "scalars": [{"kind": "loss", "value": 1.0000000000000002}]}
    (second / "rank00000.json").write_text(json.dumps(index))
    assert not same_numbers(first, second)
    (second / "rank00000.json").write_text((first / "rank00000.json").read_text())
    assert same_numbers(first, second)
    (second / "more").write_bytes(b"")
    assert not same_numbers(first, second)
