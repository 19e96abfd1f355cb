from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paralign.align.weights import FileWeights, whole_box
from paralign.errors import TraceError
from paralign.layout import Box

WHOLE = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
# Four pieces, of which the second is cut once more: uneven rows and columns.
CUTS = [(0, 4, 0, 6), (4, 7, 0, 2), (4, 7, 2, 3), (4, 7, 3, 6)]


def shards(folder: Path, cuts: list[tuple[int, int, int, int]] = CUTS) -> list[Path]:
    paths = []
    for number, (top, bottom, left, right) in enumerate(cuts):
        paths.append(folder / f"shard-{number}.safetensors")
        said = {"w": {"saved_offsets": [top, left]}, "optimizer.m": {"saved_offsets": [number]}}
        tensors = {"w": WHOLE[top:bottom, left:right].clone(), "optimizer.m": torch.ones(1)}
        save_file(tensors, paths[-1], {"DCP_SHARDING_INFO": json.dumps(said)})
    return paths


def test_every_box_of_a_tensor_is_read_from_its_shards(tmp_path: Path) -> None:
    weights = FileWeights(shards(tmp_path), leave_out="optimizer.")
    assert weights.shapes == {"w": (7, 6)}
    assert weights.codes == {"w": "F32"}
    count = 0
    for top in range(7):
        for bottom in range(top + 1, 8):
            for left in range(6):
                for right in range(left + 1, 7):
                    # Where the box lies in somebody's memory does not matter.
                    box = Box((3, 1), (top, left), (bottom - top, right - left))
                    assert torch.equal(weights.read("w", box), WHOLE[top:bottom, left:right])
                    count += 1
    assert count == 28 * 21


def test_copies_are_one_and_gaps_are_said(tmp_path: Path) -> None:
    paths = shards(tmp_path, [CUTS[0], *CUTS])
    weights = FileWeights(paths, leave_out="optimizer.")
    assert torch.equal(weights.read("w", whole_box((7, 6))), WHOLE)
    with pytest.raises(TraceError, match=r"run: a part of 'w' is missing .* \(1 tensors\)"):
        FileWeights([*paths[:2], *paths[3:]], where="run", leave_out="optimizer.")


def test_whole_tensors_and_numbers_are_read(tmp_path: Path) -> None:
    save_file({"w": WHOLE, "n": torch.tensor(3.0), "e": torch.ones(0, 2)}, tmp_path / "w")
    weights = FileWeights([tmp_path / "w"])
    assert torch.equal(weights.read("w", Box((0, 0), (1, 2), (3, 3))), WHOLE[1:4, 2:5])
    assert weights.read("n", whole_box(())) == 3
    assert weights.read("e", whole_box((0, 2))).shape == (0, 2)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x" * 100)
    with pytest.raises(TraceError, match="not a safetensors file"):
        FileWeights([tmp_path / "w"])
    save_file({"w": WHOLE}, tmp_path / "v", {"DCP_SHARDING_INFO": '{"w": 3}'})
    with pytest.raises(TraceError, match="not a safetensors file"):
        FileWeights([tmp_path / "v"])
