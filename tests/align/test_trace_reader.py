from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from paralign.align.trace_reader import TraceReader
from paralign.errors import TraceError
from paralign.layout import boxes
from tests.align.synthetic import toy_step, write_trace

MESH = {"fsdp": 2}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path / "trace", [toy_step()], mesh=MESH, placements=lambda name: (Shard(0),)
    )


def refusal(folder: Path) -> str:
    """Return the message that reading every tensor of the folder ends with."""
    with pytest.raises(TraceError) as caught, TraceReader(folder) as reader:
        for index in reader.ranks:
            for entry in index.tensors:
                for box in boxes(entry.map):
                    reader.read(entry, box)
    return str(caught.value)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_tensors_come_back_bitwise(trace: Path) -> None:
    step = toy_step()
    with TraceReader(trace) as reader:
        assert reader.world_size == 2
        seen = 0
        for index in reader.ranks:
            for entry in index.tensors:
                kind = "moment:exp_avg" if entry.kind == "moment" else entry.kind
                for box in boxes(entry.map):
                    region = tuple(
                        slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True)
                    )
                    assert torch.equal(reader.read(entry, box), step[kind, entry.name][region])
                    seen += box.numel
    assert seen == sum(tensor.numel() for tensor in step.values())


def test_a_folder_that_is_not_there_or_no_trace(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nothing")
    assert refusal(tmp_path).endswith(f"facts.json: missing, so {tmp_path} is not a trace.")
    (tmp_path / "facts.json").write_text('{"some": "thing"}')
    assert 'facts.json: it does not say "format": "paralign-trace"' in refusal(tmp_path)
    (tmp_path / "facts.json").write_text("[1]")
    assert 'facts.json: it does not say "format"' in refusal(tmp_path)


def test_unfinished_recording(trace: Path) -> None:
    (trace / "rank00001.json").unlink()
    assert "rank00001.json: missing, so rank 1 of 2 did not finish recording" in refusal(trace)
    (trace / "facts.json").unlink()
    assert "facts.json: missing, so rank 0 did not finish recording" in refusal(trace)


@pytest.mark.parametrize("name", ["facts.json", "rank00001.json"])
def test_truncated_json(trace: Path, name: str) -> None:
    path = trace / name
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    assert f"{name}: damaged or not written by pa.record" in refusal(trace)


def test_truncated_payload(trace: Path) -> None:
    path = trace / "rank00001.step0.grad.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "rank00001.step0.grad.safetensors: it has" in refusal(trace)
    path.unlink()
    assert "rank00001.step0.grad.safetensors: missing, though rank00001.json" in refusal(trace)


def test_damaged_payload_of_the_right_size(trace: Path) -> None:
    path = trace / "rank00000.step0.grad.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert "rank00000.step0.grad.safetensors: damaged" in refusal(trace)


def test_payload_of_another_trace(trace: Path, tmp_path: Path) -> None:
    other = write_trace(
        tmp_path / "other",
        [toy_step(1)],
        mesh=MESH,
        placements=lambda name: (Shard(0),),
        trace_id="ot",
    )
    name = "rank00000.step0.grad.safetensors"
    shutil.copy(other / name, trace / name)
    message = refusal(trace)
    assert f"{name}: it was written as {name!r} of trace 'ot'" in message
    assert "mixed up" in message


def test_payloads_that_changed_places(trace: Path) -> None:
    grad, param = (trace / f"rank00000.step0.{kind}.safetensors" for kind in ("grad", "param"))
    text = grad.read_bytes()
    # Same length of names, so only what the file says of itself can tell.
    index = json.loads((trace / "rank00000.json").read_text())
    grad.write_bytes(param.read_bytes())
    index["files"][grad.name] = grad.stat().st_size
    (trace / "rank00000.json").write_text(json.dumps(index))
    assert text != grad.read_bytes()
    assert "it was written as 'rank00000.step0.param.safetensors'" in refusal(trace)


def test_index_of_another_trace_or_rank(trace: Path, tmp_path: Path) -> None:
    first, second = trace / "rank00000.json", trace / "rank00001.json"
    original = second.read_text()
    shutil.copy(first, second)
    assert "rank00001.json: it is the index of rank 0" in refusal(trace)
    second.write_text(original)
    edit(second, '"trace_id": "id"', '"trace_id": "zz"')
    assert "rank00001.json: it belongs to trace zz of 2 ranks" in refusal(trace)


def test_ranks_of_a_larger_world_left_behind(trace: Path) -> None:
    (trace / "rank00002.json").write_text("{}")
    assert "rank00002.json: it is of rank 2, but facts.json counts 2 ranks" in refusal(trace)


def test_ranks_that_stopped_at_different_steps(trace: Path) -> None:
    index = json.loads((trace / "rank00001.json").read_text())
    index["steps"] = []
    (trace / "rank00001.json").write_text(json.dumps(index))
    assert "rank00001.json: rank 1 recorded the steps [], but rank 0 recorded [0]" in refusal(trace)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 9, "format version 9, but this paralign reads 1"),
        ("complete", False, "it is not complete"),
        ("rank", "x", "invalid literal"),
        ("tensors", [{}], "'kind' is missing"),
        ("axes", [], "damaged"),
    ],
)
def test_index_with_wrong_fields(trace: Path, field: str, value: object, message: str) -> None:
    path = trace / "rank00000.json"
    index = json.loads(path.read_text())
    index[field] = value
    path.write_text(json.dumps(index))
    text = refusal(trace)
    assert "rank00000.json" in text
    assert message in text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("map", [[[0, 2, 0, 3]], [[0, 4, 0, 4]]], "has a broken map of dim 0"),
        ("map", [[[0, 4, 5, 9]], [[0, 4, 0, 4]]], "outside of its global size 7"),
        ("map", [[[0, 4, 0, 4]]], "maps 1 dims of 2"),
        ("dtype", "complex64", "unknown dtype 'complex64'"),
        ("partial_op", "max", "partial_op='max'"),
        ("key", None, "needs file and key, or neither"),
        ("file", "rank00000.other.safetensors", "not listed in files"),
        ("shape", [70, 4], None),
        ("map", [[[0, 2, 0, 2]], [[0, 4, 0, 4]]], "The files are mixed up"),
        ("dtype", "float32", "is F64 [4, 4], but the index says F32"),
    ],
)
def test_entry_with_wrong_fields(
    trace: Path, field: str, value: object, message: str | None
) -> None:
    path = trace / "rank00000.json"
    index = json.loads(path.read_text())
    assert index["tensors"][0]["name"] == "embed.weight"
    index["tensors"][0][field] = value
    path.write_text(json.dumps(index))
    if message is None:  # larger than what the ranks hold together: coverage, not damage
        with TraceReader(trace) as reader:
            assert reader.ranks[0].tensors[0].shape == (70, 4)
    else:
        text = refusal(trace)
        assert message in text
        assert "rank00000" in text


def test_payload_outside_of_the_folder_is_refused(trace: Path) -> None:
    path = trace / "rank00000.json"
    index = json.loads(path.read_text())
    index["files"] = {"../rank00000.x.safetensors": 8}
    path.write_text(json.dumps(index))
    assert "it names the file '../rank00000.x.safetensors'" in refusal(trace)
