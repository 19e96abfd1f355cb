from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from paralign.align.lens import Window, row_major
from paralign.align.payload import Payload, Scratch

TENSORS = {
    "a": torch.arange(7 * 300, dtype=torch.float32).view(7, 300),
    "b": torch.arange(40, dtype=torch.bfloat16).view(2, 4, 5),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("payload") / "x.safetensors"
    save_file(TENSORS, path, metadata={"who": "me"})
    return path


def test_reads_what_safetensors_wrote(path: Path) -> None:
    file = Payload(path)
    assert file.metadata == {"who": "me"}
    for key, tensor in TENSORS.items():
        found = file.read(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert file.describe("b") == ("BF16", (2, 4, 5))
    file.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_window_is_what_as_strided_sees(path: Path, data: Any) -> None:
    tensor = TENSORS["a"]
    strides = data.draw(st.tuples(st.sampled_from([0, 1, 3, 300, 601]), st.sampled_from([1, 300])))
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    window = Window(0, shape, strides)
    offset = data.draw(st.integers(0, max(0, tensor.numel() - window.reach)))
    window = Window(offset, shape, strides)
    if window.offset + window.reach > tensor.numel():
        return
    file = Payload(path)
    expected = tensor.reshape(-1).as_strided(shape, strides, offset)
    assert torch.equal(file.read("a", window), expected)
    scratch = Scratch()
    for _ in range(2):  # the second time into the same memory
        assert torch.equal(file.read("a", window, scratch), expected)
    file.close()


def test_scattered_rows_are_read_row_by_row(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("paralign.align.payload._SMALL_BYTES", 0)
    file = Payload(path)
    column = Window(5, (7, 2), (300, 1))
    assert torch.equal(file.read("a", column), TENSORS["a"][:, 5:7])
    turned = Window(0, (300, 7), (1, 300))
    assert torch.equal(file.read("a", turned), TENSORS["a"].t())
    file.close()


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        (Window(0, (8, 300), row_major((8, 300))), "too few"),
        (Window(-1, (2,), (1,)), "too few"),
    ],
)
def test_a_window_beyond_the_tensor(path: Path, window: Window, problem: str) -> None:
    file = Payload(path)
    with pytest.raises(ValueError, match=problem):
        file.read("a", window)
    with pytest.raises(ValueError, match="holds no tensor 'z'"):
        file.read("z")
    file.close()


def rewrite(path: Path, change: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda h: [], "no table"),
        (lambda h: {**h, "a": {}}, "not one of safetensors"),
        (lambda h: {**h, "a": {**h["a"], "dtype": "F7"}}, "unknown dtype 'F7'"),
        (lambda h: {**h, "a": {**h["a"], "shape": [8, 300]}}, "does not fit"),
        (lambda h: {**h, "a": {**h["a"], "data_offsets": [0, 10**9]}}, "does not fit"),
        (lambda h: {**h, "a": {**h["a"], "shape": [-7, -300]}}, "does not fit"),
    ],
)
def test_headers_that_lie(path: Path, tmp_path: Path, change: Any, problem: str) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(path.read_bytes())
    rewrite(copy, change)
    with pytest.raises(ValueError, match=problem):
        Payload(copy)


def test_files_that_are_cut_off(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    for size in (0, 4, 20):
        copy.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match="cut off"):
            Payload(copy)
    copy.write_bytes(path.read_bytes())
    file = Payload(copy)
    copy.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(ValueError, match="the file ends before its data does"):
        file.read("a")
        file.read("b")
        file.read("scalar")
    file.close()
