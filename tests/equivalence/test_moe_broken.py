"""Every rule of experts on a mesh, broken on purpose, is noticed, and where it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

import paralign.parallel.expert
import paralign.parallelize
import paralign.program
from paralign.local_weights import local_parameters
from paralign.models.experts import NOT_HERE, Experts
from paralign.models.router import Router, update_biases
from paralign.parallel.expert import ExpertForward, Route, plan_route
from paralign.testing import run_on_ranks
from tests import parity
from tests.equivalence.test_moe import MODELS
from tests.parity import GRAD_TOLERANCE, LOSS_TOLERANCE, Result, make_config

pytestmark = pytest.mark.ranks

CONFIG = make_config(
    model={**MODELS["pangu_moe"], "num_layers": 2},
    mesh={"dp_shard": 2, "cp": 2, "ep": 2},
    pipeline={"schedule": "GPipe", "num_microbatches": 1},
    batch={"global_batch": 8, "seq_len": 16},
)


def _replace(owner: Any, attribute: str, value: Any) -> None:
    mock.patch.object(owner, attribute, value).start()


def nothing() -> None:
    """Leave everything as it is: the run that must be aligned."""


def experts_not_combined_over_ep() -> None:
    """Let each rank compute its tokens with its own experts only."""

    def alone(self: ExpertForward, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        first = dist.get_rank(self._group) * self._num_local
        chosen = indices - first
        chosen = chosen.where((chosen >= 0) & (chosen < self._num_local), NOT_HERE)
        with local_parameters(self._module):
            return self._call(x, chosen, weights)

    _replace(ExpertForward, "__call__", alone)


def sent_to_the_wrong_expert() -> None:
    def route(indices: Tensor, *, num_local: int, degree: int) -> Route:
        right = plan_route(indices, num_local=num_local, degree=degree)
        other = (num_local - 1 - right.indices).where(right.indices != NOT_HERE, NOT_HERE)
        return right._replace(indices=other)

    _replace(paralign.parallel.expert, "plan_route", route)


def router_gradient_of_one_rank() -> None:
    """Lose what all ranks but the first add to the gradient of the router."""
    forward = Router.forward

    def detached(self: Router, x: Tensor, predicted: Any = None) -> Any:
        if dist.get_rank():
            self.gate.weight.register_hook(lambda grad: grad * 0)
        return forward(self, x, predicted)

    _replace(Router, "forward", detached)


def expert_gradients_times_ep() -> None:
    forward = Experts.forward

    def doubled(self: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        for parameter in (self.gate, self.up, self.down):
            parameter.register_hook(lambda grad: grad * 2)
        return forward(self, x, indices, weights)

    _replace(Experts, "forward", doubled)


def balance_of_slices() -> None:
    """Balance each rank's slice of a sequence by itself."""
    _replace(paralign.parallelize, "_balance_whole_sequences", lambda stage, mesh: None)


def biases_from_own_tokens() -> None:
    def own(routers: Any, *, sum_over_tokens: Any) -> None:
        update_biases(routers)

    _replace(paralign.program, "update_biases", own)


BREAKS: dict[str, Callable[[], None]] = {
    breaker.__name__: breaker
    for breaker in (
        nothing,
        experts_not_combined_over_ep,
        sent_to_the_wrong_expert,
        router_gradient_of_one_rank,
        expert_gradients_times_ep,
        balance_of_slices,
        biases_from_own_tokens,
    )
}


def broken_rank(name: str, values: Any) -> Any:
    BREAKS[name]()
    return parity._rank([(CONFIG, "key")], (), {"key": values})


@pytest.fixture(scope="module")
def reference():
    return parity._run_reference(CONFIG, ())


def run(name: str, reference: Any) -> Result:
    world = CONFIG.mesh.degrees.world_size
    outcomes = run_on_ranks(broken_rank, world, name, reference.values)
    return parity._judge(CONFIG, reference, [outcome for (outcome,) in outcomes])


def wrong_gradients(result: Result) -> set[str]:
    return {
        name
        for (kind, name), error in result.errors.items()
        if kind == "grad:0" and not error <= GRAD_TOLERANCE
    }


EXPERTS = {f"layers.1.ffn.experts.{leaf}" for leaf in ("gate", "up", "down")}
ROUTER = "layers.1.ffn.router.gate.weight"


def test_the_unbroken_run_is_the_run_of_one_device(reference):
    parity.check_result(run("nothing", reference))


@pytest.mark.parametrize("name", ["experts_not_combined_over_ep", "sent_to_the_wrong_expert"])
def test_tokens_that_miss_their_experts_change_the_loss(name, reference):
    result = run(name, reference)
    assert not result.loss_error <= LOSS_TOLERANCE
    assert EXPERTS <= wrong_gradients(result)


def test_a_router_gradient_that_is_not_summed_is_wrong_alone(reference):
    result = run("router_gradient_of_one_rank", reference)
    assert result.loss_error <= LOSS_TOLERANCE
    assert wrong_gradients(result) == {ROUTER}


@pytest.mark.long
def test_expert_gradients_times_ep_are_wrong_alone(reference):
    result = run("expert_gradients_times_ep", reference)
    assert result.loss_error <= LOSS_TOLERANCE
    assert wrong_gradients(result) == EXPERTS


@pytest.mark.long
def test_a_balance_loss_of_slices_is_wrong(reference):
    result = run("balance_of_slices", reference)
    assert not result.loss_error <= LOSS_TOLERANCE
    assert ROUTER in wrong_gradients(result)
    assert not EXPERTS & wrong_gradients(result)


@pytest.mark.long
def test_biases_from_own_tokens_are_wrong_and_nothing_else_is(reference):
    result = run("biases_from_own_tokens", reference)
    assert result.loss_error <= LOSS_TOLERANCE and not wrong_gradients(result)
    assert result.errors["param", "layers.1.ffn.router.bias"] > 1e-3
