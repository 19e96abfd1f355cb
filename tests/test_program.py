"""A program on real ranks: accumulation, changing shapes, frozen parameters, clipping, state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.config.run import RunConfig
from paralign.mesh import build_mesh
from paralign.program import Program
from paralign.prove.reference import ReferenceStep
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_pieces,
    build_program,
    init_rule,
    initialise_whole,
    numerics,
)
from tests import parity
from tests.parity import GRAD_TOLERANCE, LOSS_TOLERANCE, make_config

MESH = {"pp": 2, "dp_shard": 2}


def config_of(schedule: str = "1F1B", *, tied: bool = False, **sections: Any) -> RunConfig:
    model = {**parity.BASE["model"], "tie_embeddings": tied}
    return make_config(
        **{
            "model": model,
            "mesh": MESH,
            "pipeline": {"schedule": schedule, "num_microbatches": 4},
            **sections,
        }
    )


def random_batch(seed: int, rows: int, seq_len: int) -> dict[str, Tensor]:
    """Return tokens, and labels of which each row has another number."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (rows, seq_len), generator=generator)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    for row in range(rows):
        labels[row, seq_len - 1 - (row * seed) % (seq_len - 1) :] = -100
    return {"tokens": tokens, "labels": labels}


# The second one has other rows and another length, so that torch's schedule is built anew.
BATCHES = [random_batch(1, 16, 16), random_batch(2, 8, 12), random_batch(3, 24, 8)]
Grads = dict[str, Tensor]
Sums = dict[str, tuple[float, float]]


def one_device(config: RunConfig, batch: Mapping[str, Tensor]) -> tuple[float, int, Grads]:
    """Return loss, number of valid tokens and gradients."""
    precision = numerics("float64", config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    step = ReferenceStep(model, blueprint, precision, num_rows=4)
    loss, num_tokens = step(batch)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), num_tokens, grads


def compare(program: Program, expected: Grads) -> Sums:
    """Return (|difference|^2, |expected|^2) of this rank's shard of every gradient."""
    names = dict(program.named_parameters())
    values = {
        ("grad", name): parity._local(p.grad) for name, p in names.items() if p.grad is not None
    }
    whole = {("grad", name): grad for name, grad in expected.items()}
    sums = parity._compare(program, names, values, whole)
    return {name: total[:2] for (_, name), total in sums.items()}


def worst(expected: Grads, outcomes: list[Sums]) -> float:
    """Return the largest relative error of any gradient over all ranks."""
    totals: dict[str, list[float]] = {name: [0.0, 0.0] for name in expected}
    for sums in outcomes:
        for name, (difference, norm) in sums.items():
            totals[name][0] += difference
            totals[name][1] += norm
    assert all(norm > 0 for _, norm in totals.values()), "a gradient was compared nowhere"
    return max(math.sqrt(d / n) for d, n in totals.values())


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Gradients and loss of several calls, from one device."""

    summed: Grads
    mean: Grads  # one mean over the tokens of both batches
    mean_loss: float
    num_tokens: int
    third: Grads
    third_loss: float


def expect(config: RunConfig) -> Expected:
    (loss_a, n_a, a), (loss_b, n_b, b), (loss_c, _, c) = (one_device(config, x) for x in BATCHES)
    total = n_a + n_b
    return Expected(
        summed={name: a[name] + b[name] for name in a},
        mean={name: (n_a * a[name] + n_b * b[name]) / total for name in a},
        mean_loss=(n_a * loss_a + n_b * loss_b) / total,
        num_tokens=total,
        third=c,
        third_loss=loss_c,
    )


def accumulate(config: RunConfig, expected: Expected) -> dict[str, Any]:
    mesh = build_mesh(config.mesh.degrees)
    program = build_program(config, numerics("float64", config), mesh=mesh)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.0)
    first, second, third = (program.shard(batch) for batch in BATCHES)
    seen: dict[str, Any] = {}
    program.step(first)
    program.step(second)
    seen["summed"] = compare(program, expected.summed)
    optimizer.zero_grad()

    losses = [program.step(b, num_tokens=expected.num_tokens) for b in (first, second)]
    seen["mean"] = compare(program, expected.mean)
    seen["mean_loss"] = float(sum(losses))
    optimizer.zero_grad()

    seen["third_loss"] = float(program.step(third))
    seen["third"] = compare(program, expected.third)
    # And once more with the first shape, whose schedule exists already.
    program.step(first, num_tokens=expected.num_tokens)
    program.step(second, num_tokens=expected.num_tokens)
    both = {name: grad + expected.mean[name] for name, grad in expected.third.items()}
    seen["all"] = compare(program, both)
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [("1F1B", False), ("1F1B", True), ("ZBVZeroBubble", True), ("InterleavedZeroBubble", False)],
)
def test_gradients_add_up_over_calls_and_shapes(schedule, tied):
    config = config_of(schedule, tied=tied)
    expected = expect(config)
    seen = run_on_ranks(accumulate, 4, config, expected)
    both = {name: grad + expected.mean[name] for name, grad in expected.third.items()}
    wanted = {
        "summed": expected.summed,
        "mean": expected.mean,
        "third": expected.third,
        "all": both,
    }
    errors = {what: worst(grads, [one[what] for one in seen]) for what, grads in wanted.items()}
    assert all(error <= GRAD_TOLERANCE for error in errors.values()), errors
    for one in seen:
        assert abs(one["mean_loss"] / expected.mean_loss - 1) <= LOSS_TOLERANCE
        assert abs(one["third_loss"] / expected.third_loss - 1) <= LOSS_TOLERANCE


FROZEN = {
    "embedding": ("embedding.*",),
    "the whole first stage": ("embedding.*", "layers.0.*", "layers.1.*"),
    "half of each layer": ("layers.*.attention.*",),
}
SCHEDULES = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def check_frozen(configs: list[RunConfig], patterns: tuple[str, ...]) -> None:
    for result in parity.measure_all(configs, frozen=patterns):
        parity.check_result(result)
        frozen = {
            name
            for kind, name in result.errors
            if kind == "param" and any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        assert frozen, "nothing is frozen"
        moved = {(kind, name) for kind, name in result.errors if name in frozen}
        assert moved == {("param", name) for name in frozen}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what",
    [
        "the whole first stage",
        "half of each layer",
        pytest.param("embedding", marks=pytest.mark.long),
    ],
)
def test_frozen_parameters_leave_the_others_exact(what):
    check_frozen([config_of(name) for name in SCHEDULES], FROZEN[what])


@pytest.mark.ranks
def test_frozen_tied_parameters_leave_the_others_exact():
    check_frozen([config_of(name, tied=True) for name in SCHEDULES], ("embedding.*",))


# One that clips and one that does not.
MAX_NORMS = (0.25, 1e6)


def clip_alike(config: RunConfig, expected: list[Grads]) -> list[dict[str, Any]]:
    program = build_program(config, numerics("float64", config))
    seen = []
    for max_norm, grads in zip(MAX_NORMS, expected, strict=True):
        for parameter in program.parameters():
            parameter.grad = None
        program.step(program.shard(BATCHES[0]))
        before, norm = program.grad_norm(), program.clip_grad_norm_(max_norm)
        seen.append(
            {
                "before": float(before),
                "returned": float(norm),
                "after": float(program.grad_norm()),
                "grads": compare(program, grads),
            }
        )
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True])
def test_clipping_is_torchs_own_on_one_device(tied):
    # Replicas, shards, a sequence that is cut, and a tied pair on two pipeline ranks.
    config = config_of("GPipe", tied=tied, mesh={"pp": 2, "dp_replicate": 2, "cp": 2})
    _, _, grads = one_device(config, BATCHES[0])
    norms, clipped = [], []
    for max_norm in MAX_NORMS:
        parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            parameter.grad = grad.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        pairs = zip(grads, parameters, strict=True)
        clipped.append({name: p.grad for name, p in pairs if p.grad is not None})
    assert MAX_NORMS[0] < norms[0] < MAX_NORMS[1]

    outcomes = run_on_ranks(clip_alike, 8, config, clipped)
    for number, (max_norm, norm) in enumerate(zip(MAX_NORMS, norms, strict=True)):
        assert worst(clipped[number], [one[number]["grads"] for one in outcomes]) <= GRAD_TOLERANCE
        for one in (outcome[number] for outcome in outcomes):
            assert one["before"] == one["returned"]
            assert abs(one["returned"] / norm - 1) <= LOSS_TOLERANCE
            assert abs(one["after"] / min(norm, max_norm) - 1) <= 1e-5  # torch adds 1e-6 to it


def describe_state(config: RunConfig, whole: Grads) -> dict[str, Any]:
    program = build_program(config, numerics("float64", config))
    state: dict[str, Any] = dict(program.state_dict())
    names: dict[str, Any] = dict(program.named_parameters())
    wrong = [
        name
        for name, value in state.items()
        if not torch.equal(value.to_local(), parity._slice(value, value.to_local(), whole[name]))
    ]
    return {
        "wrong": wrong,
        "state": {name: tuple(value.shape) for name, value in state.items()},
        "shares": all(
            value.to_local().data_ptr() == names[name].to_local().data_ptr()
            for name, value in state.items()
        ),
        "needs_grad": [name for name, value in state.items() if value.requires_grad],
        "parameters": list(names),
        "modules": [name for module in program.modules for name, _ in module.named_parameters()],
        "aliases": program.tied_aliases,
        "schedule": program.plan.schedule,
        "mesh": program.mesh.shape,
    }


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True])
def test_the_state_of_all_ranks_together_is_that_of_the_model(tied):
    config = config_of("Interleaved1F1B", tied=tied)
    model, blueprint = build_pieces(config, torch.float64)
    initialise_whole(model, init_rule(config, blueprint), seed=0)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    outcomes = run_on_ranks(describe_state, 4, config, whole)
    together: dict[str, tuple[int, ...]] = {}
    for one in outcomes:
        assert one["wrong"] == one["needs_grad"] == []
        assert one["shares"]  # what is loaded into the state is in the parameters
        assert one["parameters"] == one["modules"]
        assert one["aliases"] == ({"head.weight": "embedding.weight"} if tied else {})
        assert (one["schedule"], one["mesh"]) == ("Interleaved1F1B", (2, 1, 2, 1, 1))
        together |= one["state"]
    assert together == {name: tuple(value.shape) for name, value in whole.items()}
    # Stages of different pipeline ranks share no name; ranks of one share all.
    assert outcomes[0]["state"] == outcomes[1]["state"]
    assert not outcomes[0]["state"].keys() & outcomes[2]["state"].keys()
    everything = {*outcomes[0]["parameters"], *outcomes[2]["parameters"]}
    assert everything - together.keys() == ({"head.weight"} if tied else set())


def reductions(configs: list[RunConfig]) -> list[dict[str, int]]:
    mesh = build_mesh(configs[0].mesh.degrees)
    seen = []
    for config in configs:
        program = build_program(
            config,
            numerics("float64", config),
            mesh=mesh,
            prepare=lambda model: parity.freeze(model, ("layers.1.*",)),
        )
        batch = program.shard(BATCHES[0])
        program.step(batch)
        program.step(batch)  # counted from zero again
        seen.append(program.num_reductions)
    return seen


# Grouping -> reductions of every unit. layers.1 is frozen, so alone it has nothing to reduce.
WRAPS: dict[str, tuple[Any, dict[str, int]]] = {
    "root": ("root", {"stage 0: ": 1, "stage 1: ": 1}),
    "blocks": (
        "blocks",
        {
            "stage 0: ": 1,
            "stage 0: layers.0": 1,
            "stage 0: layers.1": 0,
            "stage 1: ": 1,
            "stage 1: layers.2": 1,
            "stage 1: layers.3": 1,
        },
    ),
    "first_block": (
        "first_block",
        {"stage 0: ": 1, "stage 0: layers.0": 1, "stage 1: ": 1, "stage 1: layers.2": 1},
    ),
    "lists": (  # the second unit is on two stages, and the first stage's root owns nothing
        [["embedding", "layers.0"], ["layers.1", "layers.2"], ["head", "norm"]],
        {
            "stage 0: ": 0,
            "stage 0: embedding+layers.0": 1,
            "stage 0: layers.1": 0,
            "stage 1: ": 1,
            "stage 1: layers.2": 1,
            "stage 1: head+norm": 1,
        },
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_unit_with_something_to_train_is_reduced_once(shards):
    cases = [(wrap, m) for wrap in WRAPS for m in (1, 4)]
    configs = [
        config_of(
            mesh={"pp": 2, "dp_shard": shards},
            pipeline={"schedule": "GPipe", "num_microbatches": m},
            fsdp={"wrap": WRAPS[wrap][0]},
        )
        for wrap, m in cases
    ]
    outcomes = run_on_ranks(reductions, 2 * shards, configs)
    for number, (wrap, _) in enumerate(cases):
        counts: dict[str, int] = {}
        for one in outcomes:
            counts |= one[number]
        assert counts == WRAPS[wrap][1], cases[number]
