from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

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
    index = {"trace_id": "second", "scalars": [{"kind": "loss", "value": 1.000000000001}]}
    (second / "rank00000.json").write_text(json.dumps(index))
    assert not same_numbers(first, second)
    (second / "rank00000.json").write_text((first / "rank00000.json").read_text())
    assert same_numbers(first, second)
    (second / "more").write_bytes(b"")
    assert not same_numbers(first, second)


def test_last_bits_are_no_other_numbers(tmp_path):
    values = torch.linspace(1, 2, 32, dtype=torch.float64)
    for name, factor in (("first", 1.0), ("again", 1 + 2.0**-52), ("other", 1 + 1e-13)):
        (tmp_path / name).mkdir()
        save_file({"w": values * factor}, tmp_path / name / "rank0.safetensors")
        (tmp_path / name / "rank0.json").write_text(json.dumps({"loss": 2.0 * factor}))
    assert same_numbers(tmp_path / "first", tmp_path / "again")
    assert not same_numbers(tmp_path / "first", tmp_path / "other")
