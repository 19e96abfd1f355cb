"""Broken versions of the exchange are seen by the comparison, so that it proves something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paralign import collectives
from paralign.errors import LayoutError
from paralign.parallel import context_forward, context_masks
from paralign.parallel.context import ContextParallel
from paralign.testing import run_on_ranks
from tests.parallel.context_toys import BUDGET, SEQ_LEN, Case, PlainCore, cp_mesh, measure

Patch = Callable[[], Any]


def _tile_heads() -> Any:
    """K/V heads 0 1 0 1 instead of 0 0 1 1: query heads meet the wrong ones."""
    interleave = Tensor.repeat_interleave

    def tile(x: Tensor, repeats: int, dim: int) -> Tensor:
        if x.shape[-2] == SEQ_LEN:  # the core's own use of it, for its local heads
            return interleave(x, repeats, dim)
        return x.repeat(*(repeats if d == dim else 1 for d in range(x.ndim)))

    return mock.patch.object(Tensor, "repeat_interleave", tile)


def _own_slice_of_gradient() -> Any:
    """The backward of the gather keeps this rank's contribution only."""

    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad[dist.get_rank(ctx.group)].clone()

    return mock.patch.object(collectives._AllGatherStack, "backward", backward)


def _causal_from_shapes() -> Any:
    """Each slice of queries takes itself for the start of the sequence."""

    def rows(start: int, stop: int, *, device: torch.device) -> Tensor:
        return torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril()

    return mock.patch.object(context_forward, "causal_rows", rows)


def _chunks_in_rank_order() -> Any:
    """Gathered head and tail chunks stay where the all-gather put them."""
    return mock.patch.object(
        context_forward, "order_of", lambda held, wanted: list(range(len(wanted)))
    )


def _first_heads_of_mask() -> Any:
    """Every rank takes the mask of the first heads."""
    select = context_masks.select_heads
    return mock.patch.object(
        context_forward,
        "select_heads",
        lambda mask, first, count: select(mask, first=0, count=count),
    )


def _first_rows_of_mask() -> Any:
    """Every rank takes the mask of the first queries."""
    select = context_masks.select_rows
    return mock.patch.object(
        context_forward,
        "select_rows",
        lambda mask, runs: select(mask, [(0, sum(stop - start for start, stop in runs))]),
    )


def _measure_broken(patch: Patch, case: Case) -> dict[str, float]:
    mesh = cp_mesh()
    with patch():
        return measure(case, mesh)


GATHER = Case(cp=2, ulysses_degree=1, mask="causal")
BROKEN: list[tuple[Patch, Case, str]] = [
    (_tile_heads, Case(cp=4, num_kv_heads=2), "output"),
    (_own_slice_of_gradient, GATHER, "dk"),
    (_own_slice_of_gradient, GATHER, "dv"),
    (_causal_from_shapes, GATHER, "output"),
    (
        _chunks_in_rank_order,
        Case(cp=2, ulysses_degree=1, load_balance=True, mask="causal"),
        "output",
    ),
    (_first_heads_of_mask, Case(cp=2, mask="per_head"), "output"),
    (_first_rows_of_mask, Case(cp=2, ulysses_degree=1, mask="window"), "output"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("patch", "case", "seen_in"), BROKEN, ids=[f"{b[0].__name__}-{b[2]}" for b in BROKEN]
)
def test_a_broken_exchange_is_far_out_of_budget(patch: Patch, case: Case, seen_in: str):
    broken = [of_rank[seen_in] for of_rank in run_on_ranks(_measure_broken, case.cp, patch, case)]
    assert max(broken) > 1e-3 > 1e6 * BUDGET


class _Tuple(PlainCore):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs), None


class _Transposing(PlainCore):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).transpose(1, 2)


def _outputs() -> list[str]:
    mesh, messages = cp_mesh(), []
    q = torch.arange(64.0).view(1, 4, 4, 4) + dist.get_rank()
    for core in (_Tuple(), _Transposing()):
        try:
            ContextParallel(layout="BNSD").apply(core, mesh)(q, q, q)
        except LayoutError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_a_core_that_returns_something_else_is_refused():
    rest = (
        "; it must return one tensor in q's layout (only the last dim may differ), so that tokens "
        "and heads can be exchanged back (seq_dim=2, head_dim=1). Move a transpose or a second "
        "result out of the core."
    )
    assert (
        run_on_ranks(_outputs, 2)
        == [
            [
                f"_Tuple returned tuple for q of shape [1, 2, 8, 4]{rest}",
                f"_Transposing returned [1, 8, 2, 4] for q of shape [1, 2, 8, 4]{rest}",
            ]
        ]
        * 2
    )
