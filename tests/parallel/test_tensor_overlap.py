"""Linears in chunks give what a collective and a linear give, with every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paralign.collectives import all_gather_dim, reduce_scatter_dim
from paralign.errors import LayoutError
from paralign.parallel.tensor_overlap import (
    NUM_CHUNKS,
    Handoff,
    gathered_linears,
    scattered_linear,
)
from paralign.testing import run_on_ranks

EPS = torch.finfo(torch.float64).eps


def make(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(mine: Tensor | None, expected: Tensor | None) -> None:
    assert mine is not None and expected is not None
    assert float((mine - expected).norm()) <= 10 * EPS * float(expected.norm())


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def _gathered(dim: int, tokens: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    shape = [2, 3, 4]
    shape[dim] = tokens
    given = make(rank, *shape), make(10 + rank, 5, 4), make(20 + rank, 6, 4), make(30, 7, 4)
    mine, plain = leaves(*given), leaves(*given)
    whole, outputs = gathered_linears(mine[0], mine[1:], dim=dim, group=group)
    gathered = all_gather_dim(plain[0], dim=dim, group=group)
    expected = [F.linear(gathered, weight) for weight in plain[1:]]
    assert torch.equal(whole, gathered)
    for out, want in zip(outputs, expected, strict=True):
        close(out, want)
    # One output is used twice, one not at all, and the stream by itself as well.
    for made, stream in ((outputs, whole), (expected, gathered)):
        loss = (made[0].sin() + made[0]).sum() + made[1].square().sum() + stream.cos().sum()
        loss.backward()
    for one, other in zip(mine[:3], plain[:3], strict=True):
        close(one.grad, other.grad)
    assert mine[3].grad is None and plain[3].grad is None


def _scattered(dim: int, tokens: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    shape = [2, 3, 4]
    shape[dim] = tokens * dist.get_world_size()
    given = make(rank, *shape), make(10 + rank, 5, 4)
    mine, plain = leaves(*given), leaves(*given)
    out = scattered_linear(mine[0], mine[1], dim=dim, group=group)
    expected = reduce_scatter_dim(F.linear(plain[0], plain[1]), dim=dim, group=group)
    close(out, expected)
    out.sin().sum().backward()
    expected.sin().sum().backward()
    for one, other in zip(mine, plain, strict=True):
        close(one.grad, other.grad)


def _every_size(function_name: str) -> None:
    function = {"gathered": _gathered, "scattered": _scattered}[function_name]
    for dim in (0, 1):
        for tokens in (1, NUM_CHUNKS, 2 * NUM_CHUNKS + 1):  # one chunk, equal ones, unequal ones
            function(dim, tokens)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gathered", "scattered"])
def test_chunks_give_the_same_results_and_gradients(name: str):
    for degree in (1, 3):
        run_on_ranks(_every_size, degree, name)


def _refused() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(LayoutError, match="does not split evenly over 2 ranks"):
        scattered_linear(make(0, 1, 3, 4), make(1, 5, 4), dim=1, group=group)


@pytest.mark.ranks
def test_tokens_that_do_not_divide_are_refused():
    run_on_ranks(_refused, 2)


def _handed_on() -> None:
    group = dist.group.WORLD
    assert group is not None
    handoff, weight = Handoff(), make(0, 3, 4)
    here = handoff.register(lambda: weight)
    sharded = handoff.register(lambda: None)  # FSDP has not gathered it yet
    x = handoff.gather(make(dist.get_rank(), 1, 2, 4), dim=1, group=group)
    assert handoff.take(here, x.clone()) is None  # not the tensor that was gathered
    assert handoff.take(sharded, x) is None
    made = handoff.take(here, x)
    close(made, F.linear(x, weight))
    assert handoff.take(here, x) is None  # once
    handoff.gather(make(1, 1, 2, 4), dim=1, group=group)
    handoff.clear()
    assert handoff.take(here, x) is None


@pytest.mark.ranks
def test_a_product_is_handed_on_once_and_only_for_its_own_input():
    run_on_ranks(_handed_on, 2)
