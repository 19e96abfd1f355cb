"""Experts over ranks: where tokens go, what comes back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paralign.errors import LayoutError
from paralign.models.experts import NOT_HERE, Experts
from paralign.parallel.expert import NOT_HERE as NOWHERE
from paralign.parallel.expert import ExpertParallel, plan_route
from paralign.testing import run_on_ranks
from tests.models.helpers import fill_everything

E, D, F, K = 8, 6, 5, 3


def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_its():
    indices = torch.tensor([[0, 3], [2, 3], [1, 0], [NOWHERE, 2]])
    route = plan_route(indices, num_local=2, degree=2)
    assert route.send.tolist() == [2, 3]
    assert route.token.tolist() == [0, 2, 0, 1, 3]
    there = NOWHERE
    assert route.indices.tolist() == [[0, there], [1, 0], [there, 1], [0, 1], [there, 0]]


def test_no_token_goes_nowhere():
    route = plan_route(torch.empty(0, K, dtype=torch.int64), num_local=2, degree=4)
    assert route.send.tolist() == [0] * 4 and route.token.numel() == 0


def test_both_sides_mean_the_same_by_nowhere():
    assert NOT_HERE == NOWHERE


def tokens_of(rank: int, case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a rank; each rank has another number of them."""
    generator = torch.Generator().manual_seed(rank)
    count = {"uneven": 3 * rank, "one rank": 4, "many": 20}[case]
    x = torch.randn(count, D, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, K, generator=generator, dtype=torch.float64)
    indices = torch.rand(count, E, generator=generator).topk(K).indices
    if case == "one rank":  # all on the last one; the others get no token
        indices = torch.tensor([[E - 1, E - 2, NOWHERE]]).expand(count, -1)
    return x.requires_grad_(), indices, weights.requires_grad_()


def stack() -> Experts:
    experts = Experts(E, D, F, bias=True).double()
    fill_everything(experts)
    return experts


def spread(case: str) -> list[tuple[float, str]]:
    """Return the relative error of everything that this rank can see."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    rank, n = mesh.get_local_rank(), mesh.size()
    whole, experts = stack(), ExpertParallel().apply(stack(), mesh)
    x, indices, weights = tokens_of(rank, case)
    out = experts(x, indices, weights)
    out.sin().sum().backward()
    everyone = [tokens_of(r, case) for r in range(n)]
    for each in everyone:
        whole(*each).sin().sum().backward()
    x_whole, _, weights_whole = everyone[rank]
    found = [
        (error(out, whole(*everyone[rank])), "out"),
        (error(x.grad, x_whole.grad), "x"),
        (error(weights.grad, weights_whole.grad), "weights"),
    ]
    expected: dict[str, Any] = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in experts.named_parameters():
        grad: Any = parameter.grad
        found.append((error(grad.to_local(), expected[name].chunk(n)[rank]), name))
    return found


def error(got: Any, expected: Any) -> float:
    assert got.shape == expected.shape
    difference, size = float((got - expected).norm()), float(expected.norm())
    return difference / size if size else difference


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["uneven", "one rank", "many"])
def test_outputs_and_gradients_are_those_of_one_stack(case):
    for found in run_on_ranks(spread, 4, case):
        for worst, what in found:
            assert worst <= 1e-14, what


def test_stacks_that_do_not_split_are_refused():
    style = ExpertParallel()
    assert style.problems(stack(), 4) == []
    assert style.problems(stack(), 3) == [
        "8 experts do not split evenly over axis 'ep' (3 ranks, remainder 2)"
    ]
    (problem,) = style.problems(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), 2)
    assert problem.startswith("its parameters are no stack of equally many experts: {")


def refused() -> str:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("ep",))
    try:
        ExpertParallel().apply(stack(), mesh)
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_applying_to_what_does_not_split_raises():
    assert set(run_on_ranks(refused, 3)) == {
        "cannot spread Experts: 8 experts do not split evenly over axis 'ep' (3 ranks, remainder 2)"
    }
