"""Every rule of experts under tensor parallelism, broken on purpose, is noticed where it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import paralign.parallelize
import paralign.program
from paralign.config.run import RunConfig
from paralign.mesh import Axis, fold
from paralign.parallel.tensor import apply_tensor
from paralign.parallel.tensor_tokens import OwnTokens
from paralign.parallel.tensor_weights import is_replicated, sum_partial_gradients
from paralign.testing import run_on_ranks
from tests import parity
from tests.equivalence.test_moe import MODELS
from tests.equivalence.test_moe_broken import _replace, wrong_gradients
from tests.parity import LOSS_TOLERANCE, Result, make_config

pytestmark = pytest.mark.ranks


def config_of(*, sequence_parallel: bool) -> RunConfig:
    return make_config(
        model={**MODELS["pangu_moe"], "num_layers": 2},
        mesh={"dp_shard": 2, "tp": 2, "ep": 2},
        pipeline={"schedule": "GPipe", "num_microbatches": 1},
        batch={"global_batch": 8, "seq_len": 16},
        tensor={"sequence_parallel": sequence_parallel},
    )


def nothing() -> None:
    """Leave everything as it is: the run that must be aligned."""


def router_gradients_not_reduced_over_tp() -> None:
    """Sum all other gradients that are partial over tp, but not those of routers."""

    def without_routers(parameters: Any, group: Any) -> None:
        sum_partial_gradients([p for p in parameters if p.shape[0] != 8], group)

    _replace(paralign.program, "sum_partial_gradients", without_routers)


def counts_not_over_tp() -> None:
    """Let router biases follow the tokens of one rank of tp."""
    real = fold

    def without_tp(mesh: Any, view: Axis) -> Any:
        return real(mesh, Axis.LOSS if view is Axis.ROUTED else view)

    _replace(paralign.program, "fold", without_tp)


def balance_not_over_tp() -> None:
    """Balance the part of a sequence that one rank of tp has by itself."""
    real = fold

    def without_tp(mesh: Any, view: Axis) -> Any:
        return mesh[str(Axis.CP)] if view is Axis.SEQUENCE else real(mesh, view)

    _replace(paralign.parallelize, "fold", without_tp)


def tokens_not_split() -> None:
    """Let every rank of tp route and compute all tokens of the stream."""
    _replace(OwnTokens, "run", lambda self, module, call, region: call)


def experts_summed_over_tp() -> None:
    """Sum what ranks of tp have of experts, as if they all had the same."""

    def with_experts(stage: Any, mesh: Any, *, experts: Sequence[str], **rest: Any) -> set[str]:
        partial = apply_tensor(stage, mesh, experts=experts, **rest)
        return partial | {n for n, _ in stage.named_parameters() if n.startswith(tuple(experts))}

    _replace(paralign.parallelize, "apply_tensor", with_experts)


def norm_divides_experts_by_tp() -> None:
    """Count experts in the norm as if every rank of tp had the same."""

    def by_name(parameter: Any, axis: Any) -> bool:
        names = parameter.device_mesh.mesh_dim_names
        return str(axis) not in names or is_replicated(parameter, axis)

    _replace(paralign.program, "is_replicated", by_name)


BREAKS: dict[str, Callable[[], None]] = {
    breaker.__name__: breaker
    for breaker in (
        nothing,
        router_gradients_not_reduced_over_tp,
        counts_not_over_tp,
        balance_not_over_tp,
        tokens_not_split,
        experts_summed_over_tp,
        norm_divides_experts_by_tp,
    )
}
CONFIGS = {True: config_of(sequence_parallel=True), False: config_of(sequence_parallel=False)}


def broken_ranks(name: str, values: Any, *, sequence_parallel: bool) -> Any:
    BREAKS[name]()
    return parity._rank([(CONFIGS[sequence_parallel], "key")], (), {"key": values})


@pytest.fixture(scope="module")
def reference():
    return parity._run_reference(CONFIGS[True], ())  # sequence parallel is nothing to it


def run(name: str, reference: Any, *, sequence_parallel: bool = True) -> Result:
    config = CONFIGS[sequence_parallel]
    call = partial(broken_ranks, sequence_parallel=sequence_parallel)
    outcomes = run_on_ranks(call, config.mesh.degrees.world_size, name, reference.values)
    return parity._judge(config, reference, [outcome for (outcome,) in outcomes])


EXPERTS = {
    f"layers.1.ffn.experts.{leaf}{bias}"
    for leaf in ("gate", "up", "down")
    for bias in ("", "_bias")
}
ROUTER = "layers.1.ffn.router.gate.weight"


def test_the_unbroken_run_is_the_run_of_one_device(reference):
    parity.check_result(run("nothing", reference))


def test_a_router_gradient_that_is_not_reduced_over_tp_is_wrong_alone(reference):
    result = run("router_gradients_not_reduced_over_tp", reference)
    assert result.loss_error <= LOSS_TOLERANCE
    assert wrong_gradients(result) == {ROUTER}


def test_tokens_that_are_not_split_are_computed_twice(reference):
    result = run("tokens_not_split", reference, sequence_parallel=False)
    wrong = wrong_gradients(result)
    assert wrong >= EXPERTS | {ROUTER}
    shared = {f"layers.1.ffn.shared.{x}.{y}" for x in ("gate", "up", "down") for y in LEAVES}
    assert wrong >= shared
    for name in EXPERTS | shared:  # exactly twice as large
        assert abs(result.errors["grad:0", name] - 1) <= 1e-3


LEAVES = ("weight", "bias")


@pytest.mark.long
def test_experts_summed_over_the_wrong_ranks_are_wrong_alone(reference):
    result = run("experts_summed_over_tp", reference)
    assert result.loss_error <= LOSS_TOLERANCE
    assert wrong_gradients(result) == EXPERTS


@pytest.mark.long
def test_counts_of_a_part_of_the_tokens_move_biases_otherwise_and_nothing_else(reference):
    result = run("counts_not_over_tp", reference)
    assert result.loss_error <= LOSS_TOLERANCE and not wrong_gradients(result)
    assert result.errors["param", "layers.1.ffn.router.bias"] > 1e-3


@pytest.mark.long
def test_a_balance_loss_of_a_part_of_a_sequence_is_wrong(reference):
    result = run("balance_not_over_tp", reference)
    assert not result.loss_error <= LOSS_TOLERANCE
    assert ROUTER in wrong_gradients(result)
    assert not EXPERTS & wrong_gradients(result)


@pytest.mark.long
def test_a_norm_that_takes_experts_for_copies_is_wrong(reference):
    result = run("norm_divides_experts_by_tp", reference)
    assert not wrong_gradients(result)
    assert not result.norm_error <= LOSS_TOLERANCE
