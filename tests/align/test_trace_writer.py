from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paralign.align.trace import DTYPE_CODES, RankIndex, TensorEntry
from paralign.align.trace_writer import TraceWriter, dtype_name, prepare_folder, write_payload
from paralign.errors import TraceError
from paralign.layout import whole

DTYPES = [getattr(torch, name) for name in DTYPE_CODES]


def test_payload_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        f"t.{i}": torch.arange(1, 2 + 3 * i).to(torch.float32).to(dtype)
        for i, dtype in enumerate(DTYPES)
    }
    tensors["scalar"] = torch.tensor(1.5, dtype=torch.float64)
    tensors["empty"] = torch.empty(0, 3)
    tensors["transposed"] = torch.arange(6.0).view(2, 3).T
    path = tmp_path / "x.safetensors"
    size = write_payload(path, list(tensors.items()), {"a": "b"})
    assert path.stat().st_size == size
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        found, given = (t.reshape(-1).contiguous().view(torch.uint8) for t in (loaded[key], tensor))
        assert torch.equal(found, given)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_dtype_without_a_place_is_refused() -> None:
    with pytest.raises(TraceError, match="'w' has dtype=complex64, which a trace cannot hold"):
        dtype_name(torch.complex64, "w")


def test_a_failing_write_leaves_no_payload(tmp_path: Path) -> None:
    class Failing:
        shape = (1,)
        dtype = torch.float32

        def element_size(self) -> int:
            return 4

        def numel(self) -> int:
            return 1

        def detach(self) -> None:
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        write_payload(tmp_path / "x.safetensors", [("w", Failing())], {})  # type: ignore[list-item]
    assert not (tmp_path / "x.safetensors").exists()


def test_copies_of_one_parameter_get_keys_of_their_own(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, RankIndex(0, 1, "id"))
    entry = TensorEntry("grad", "w", 0, "float32", (2,), whole((2,)))
    writer.write("step0.grad", [(entry, torch.zeros(2)), (entry, torch.ones(2))])
    keys = [placed.key for placed in writer.index.tensors]
    assert len(set(keys)) == 2
    values = load_file(tmp_path / "rank00000.step0.grad.safetensors")
    assert [values[str(key)].sum().item() for key in keys] == [0.0, 2.0]


def test_writing_needs_no_copy_of_the_tensors(tmp_path: Path) -> None:
    tensors = [(f"t{i}", torch.zeros(1 << 20)) for i in range(4)]
    tracemalloc.start()
    write_payload(tmp_path / "x.safetensors", tensors, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # one tensor is 4 MiB


def test_folder_is_cleared_of_an_earlier_trace_and_nothing_else(tmp_path: Path) -> None:
    for name in ("facts.json", "rank00000.json", "rank00001.step0.grad.safetensors"):
        (tmp_path / name).write_text("{}")
    prepare_folder(tmp_path, rank=1, clear_all=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["facts.json", "rank00000.json"]
    prepare_folder(tmp_path, rank=0, clear_all=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "rank00000.json").write_text("{}")
    with pytest.raises(TraceError, match=r"holds 'thesis.tex', which is no part of a trace"):
        prepare_folder(tmp_path, rank=0, clear_all=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("")
    with pytest.raises(TraceError, match=r"is a file\. Name a folder for the trace"):
        prepare_folder(path, rank=0, clear_all=True)


def test_index_is_json_that_every_reader_accepts(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, RankIndex(3, 4, "id"))
    writer.finish(None)
    text = (tmp_path / "rank00003.json").read_text()
    assert json.loads(text)["rank"] == 3
    assert not (tmp_path / "facts.json").exists()
