from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paralign.align import compare
from tests.align.explain.scene import Run, Scene, write
from tests.align.explain.test_data import MESH, batch, share

FEATURES = 8


def output(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((4, 8, FEATURES), generator=generator, dtype=torch.float64)


def explain(tmp_path: Path, change):
    """Compare with a run whose module ``b`` returns ``change(right)``; ``a`` is right."""
    scene = Scene(MESH)
    reference = scene.rank()
    reference.inputs = [batch()]
    reference.outputs = [{"a": output(1), "b": output(2), "c": output(3)}]
    write(tmp_path / "ref", [reference], {})
    runs: list[Run] = []
    wrong = change(output(2))
    for at in scene.coordinates:
        run = scene.rank(Scene(MESH, seed=5).right())
        run.inputs = [share(at)]
        rows, columns = slice(2 * at[0], 2 * at[0] + 2), slice(4 * at[1], 4 * at[1] + 4)
        both = {"a": output(1), "b": wrong, "c": output(3) + wrong.sum()}
        run.outputs = [{n: t[rows, columns].contiguous() for n, t in both.items()}]
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    (finding, *_) = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings
    assert finding.component == "forward"
    assert finding.tensor == "b"
    return finding


def dropped(x: Tensor) -> Tensor:
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) > 0.1
    return x * mask / 0.9


def after(x: Tensor, first: int, last: int | None = None) -> Tensor:
    """Return ``x`` with everything wrong from one position to another."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)
    wrong = x.clone()
    wrong[:, first:last] += noise[:, first:last]
    return wrong


@pytest.mark.parametrize(
    ("change", "cause", "axes"),
    [
        (lambda x: 2 * x, "constant_factor", []),
        (lambda x: x.bfloat16().double(), "precision", []),
        (dropped, "rng", []),
        (lambda x: x * (1 + 0.1 * torch.arange(8).double())[None, :, None], "different_config", []),
        (lambda x: x.flip(2), "permuted_shards", ["cp"]),
        (lambda x: output(3), "wrong_layer", []),
        (lambda x: after(x, 4), "mask_or_positions", ["cp"]),
        (lambda x: after(x, 0, 7), "mask_or_positions", []),
        (lambda x: after(x, 1), "wrong_axis", ["cp"]),
        (lambda x: after(x, 0), "unknown", []),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_first_output_that_is_off(tmp_path: Path, change, cause: str, axes: list[str]) -> None:
    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == (cause, axes)
