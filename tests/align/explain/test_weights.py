from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from paralign.align import compare
from paralign.align.trace import Kind
from paralign.align.verdict import Finding
from tests.align.synthetic import write_trace

MESH = {"dp": 2, "cp": 2}
SHARDED = (Shard(0), Replicate())
NAMES = ("layers.0.w", "layers.1.w")


def weights() -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        (kind, name): torch.randn(8, 32, generator=generator, dtype=torch.float64)
        for name in NAMES
        for kind in (Kind.PARAM, Kind.GRAD)
    }


def explain(tmp_path: Path, change, placements=SHARDED, small=()) -> list[Finding]:
    """Compare with a run whose initial weights ``change(rank, entry, local)`` made.

    Weights called ``small`` are there besides, too small for statistics.
    """
    what = ("loss", "params", "grads")
    tensors = weights()
    for kind in (Kind.PARAM, Kind.GRAD):
        tensors |= {(kind, name): draw(len(kind), torch.Size([4])) for name in small}
    write_trace(tmp_path / "ref", [tensors], what=what)

    def edit(rank, entry, local):
        return change(rank, entry, local) if entry.kind == Kind.PARAM else local

    write_trace(
        tmp_path / "par",
        [tensors],
        what=what,
        mesh=MESH,
        placements=lambda name: placements,
        change=edit,
    )
    report = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)
    assert report.verdict == "inconclusive"
    return report.findings


def draw(seed: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_shards_drawn_from_one_seed(tmp_path: Path) -> None:
    findings = explain(tmp_path, lambda rank, entry, local: draw(len(entry.name), local.shape))
    assert (findings[0].component, findings[0].cause) == ("weights", "rng")
    assert findings[0].axes == ["dp"]


def test_replicas_drawn_from_different_seeds(tmp_path: Path) -> None:
    def change(rank, entry, local):
        return local if rank % 2 == 0 else draw(rank, local.shape)

    findings = explain(tmp_path, change, (Replicate(), Replicate()))
    assert (findings[0].cause, findings[0].axes) == ("rng", ["cp"])


def test_weights_rounded_on_their_way(tmp_path: Path) -> None:
    findings = explain(tmp_path, lambda rank, entry, local: local.bfloat16().double())
    assert (findings[0].component, findings[0].cause) == ("weights", "precision")
    assert findings[0].evidence["dtype"] == "bfloat16"


def test_another_scale_of_initialisation(tmp_path: Path) -> None:
    findings = explain(tmp_path, lambda rank, entry, local: local * 0.3)
    assert (findings[0].component, findings[0].cause) == ("weights", "constant_factor")
    assert float(findings[0].evidence["factor"]) == pytest.approx(0.3)


def test_one_ranks_old_weights(tmp_path: Path) -> None:
    findings = explain(tmp_path, lambda rank, entry, local: local * 0.99 if rank == 3 else local)
    assert (findings[0].cause, findings[0].evidence["rank"]) == ("single_rank", 3)


def test_weights_that_nothing_explains(tmp_path: Path) -> None:
    def change(rank, entry, local):
        return local + 1e-3 * draw(rank // 2 + len(entry.name), local.shape)

    (finding,) = explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("weights", "unknown")


def test_small_weights_follow_large_ones_that_were_drawn_anew(tmp_path: Path) -> None:
    def change(rank, entry, local):
        return draw(sum(entry.name.encode()), local.shape)

    findings = explain(tmp_path, change, (Replicate(), Replicate()), small=["norm.bias"])
    assert {finding.cause for finding in findings} == {"rng"}
