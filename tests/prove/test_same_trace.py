from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from paralign.prove.same_trace import same_numbers

VALUE = torch.tensor([1.0, 2.0], dtype=torch.float64)


def write(folder, *, value=VALUE, name="grad:weight", loss=1.0):
    folder.mkdir(exist_ok=True)
    payload = folder / "rank00000.safetensors"
    # As a recording writes it: every file says which recording it belongs to.
    save_file({name: value}, payload, {"trace_id": folder.name, "file": payload.name})
    index = {"trace_id": folder.name, "scalars": [{"kind": "loss", "value": loss}]}
    (folder / "rank00000.json").write_text(json.dumps(index))


@pytest.fixture
def traces(tmp_path):
    write(tmp_path / "first")
    write(tmp_path / "second")
    return tmp_path / "first", tmp_path / "second"


def test_only_the_name_of_the_recording_may_differ(traces):
    assert same_numbers(*traces)


@pytest.mark.parametrize(
    "changed",
    [
        {"value": torch.nextafter(VALUE, VALUE + 1)},
        {"value": VALUE.view(1, 2)},
        {"name": "grad:bias"},
        {"loss": 1.0000000000000002},
    ],
    ids=["a bit", "a shape", "a name", "a number"],
)
def test_whatever_is_recorded_tells(traces, changed):
    first, second = traces
    write(second, **changed)
    assert not same_numbers(first, second)


def test_another_file_tells(traces):
    first, second = traces
    (second / "more").write_bytes(b"")
    assert not same_numbers(first, second)
