from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from paralign.align import compare
from paralign.align.trace import Kind, TensorEntry
from tests.align.synthetic import write_trace

NAME = "layers.0.w"
MESH = {"dp": 2, "tp": 2}
OTHER = {2: 3, 3: 2}
"""Ranks that hold each other's part: they differ along tp alone."""


def part(full: Tensor, rank: int) -> Tensor:
    """Return the rows of a rank's dp coordinate and the columns of its tp coordinate."""
    rows, columns = full.shape[0] // 2, full.shape[1] // 2
    dp, tp = divmod(rank, 2)
    return full[dp * rows : (dp + 1) * rows, tp * columns : (tp + 1) * columns].clone()


def test_shards_were_mixed_up_along_what_their_holders_differ_in(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    step = {
        (kind, NAME): torch.randn(8, 16, generator=generator, dtype=torch.float64)
        for kind in (Kind.PARAM, Kind.GRAD)
    }
    what = ("loss", "params", "grads")
    write_trace(tmp_path / "ref", [step], what=what)

    def exchanged(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        del local
        return part(step[entry.kind, NAME], OTHER.get(rank, rank))

    write_trace(
        tmp_path / "par",
        [step],
        mesh=MESH,
        placements=lambda name: (Shard(0), Shard(1)),
        what=what,
        change=exchanged,
    )
    finding = compare(tmp_path / "ref", tmp_path / "par").findings[0]
    assert (finding.component, finding.cause) == ("weights", "permuted_shards")
    assert finding.evidence["ranks"] == [2, 3]
    assert finding.axes == ["tp"]  # and not dp, though dp cuts it as well
