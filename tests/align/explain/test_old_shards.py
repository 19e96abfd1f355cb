"""Weights that are put together from new shards and old ones."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align.explain.context import MeshAxes
from paralign.align.explain.old_shards import prove_old_shards
from paralign.align.explain.proof import Proof
from paralign.align.trace import Kind
from tests.align.explain.test_expert_parts import held

WORDS, WIDTH = 11, 12
DP, CP = 2, 3


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
OLD = {2: draw(WORDS, WIDTH, seed=1), 1: draw(WIDTH, seed=2)}
NEW = {2: OLD[2] + 1e-3 * draw(WORDS, WIDTH, seed=3), 1: OLD[1] + 1e-3 * draw(WIDTH, seed=4)}
STREAM = draw(2, 9, WIDTH, seed=5)


def module(dims: int, weight: Tensor) -> Tensor:
    return weight[TOKENS] if dims == 2 else STREAM * weight


def rank_of(number: int, size: int) -> Any:
    """FSDP over dp_shard x cp: rank i has the i-th part of the rows, which may be uneven."""
    dp, cp = divmod(number, CP)
    part = -(-size // (DP * CP))
    first, last = min(number * part, size), min((number + 1) * part, size)
    span = SimpleNamespace(local=(0, last - first), global_=(first, last))
    entry = SimpleNamespace(
        kind=Kind.PARAM, name="m.weight", map=((span,) if last > first else (),)
    )
    return SimpleNamespace(
        rank=number,
        tensors=[entry],
        coordinates={"dp_shard": dp, "cp": cp},
        axes={"dp_shard": [cp + CP * i for i in range(DP)], "cp": [dp * CP + i for i in range(CP)]},
    )


def prove(dims: int, made: Tensor, *, step: int = 1) -> Proof | None:
    due = module(dims, NEW[dims])

    def quantity(moment: Any, name: str) -> Any:
        found = held(OLD[dims] if moment.kind == Kind.PARAM else NEW[dims])
        found.problems, found.is_present = [], True
        return found if name == "m.weight" else None

    trace: Any = SimpleNamespace(
        ranks=[rank_of(number, len(OLD[dims])) for number in range(DP * CP)], world_size=DP * CP
    )
    total = SimpleNamespace(base=float(due.norm()), relative=float((made - due).norm()))
    item: Any = SimpleNamespace(
        row=SimpleNamespace(name="m"),
        moment=SimpleNamespace(step=step),
        tolerance=1e-13,
        measured=SimpleNamespace(total=total),
        base=held(due),
        side=SimpleNamespace(replicas={0: [held(made)]}),
    )
    tokens = SimpleNamespace(row=SimpleNamespace(name="tokens"), base=held(TOKENS))
    context: Any = SimpleNamespace(
        steps=(0, 1),
        reference=SimpleNamespace(quantity=quantity),
        trace=trace,
        mesh=MeshAxes(trace),
        judged=lambda kind, step: [tokens] if kind == Kind.INPUT else [],
    )
    return prove_old_shards(context, item)


def mixed(dims: int, ranks: list[int]) -> Tensor:
    """Return the weight with the rows of some ranks as they were."""
    weight = NEW[dims].clone()
    for number in ranks:
        for span in rank_of(number, len(weight)).tensors[0].map[0]:
            weight[slice(*span.global_)] = OLD[dims][slice(*span.global_)]
    return weight


@pytest.mark.parametrize(
    ("dims", "ranks", "axes"),
    [
        (2, [3, 4, 5], ("dp_shard",)),
        (2, [1, 4], ("cp",)),
        (2, [2], ("dp_shard", "cp")),
        (1, [3, 4, 5], ("dp_shard",)),
        (1, [0, 3], ("cp",)),
    ],
)
def test_old_rows_are_those_of_some_ranks(dims, ranks, axes):
    proof = prove(dims, module(dims, mixed(dims, ranks)))
    assert proof is not None
    assert (proof.component, proof.cause, proof.axes) == ("state", "stale", axes)
    assert proof.left < 1e-13
    assert set(proof.detail["ranks"]) <= {*range(DP * CP)}


@pytest.mark.parametrize("dims", [1, 2])
def test_other_errors_are_not_explained(dims):
    assert prove(dims, module(dims, NEW[dims]) + 1e-3) is None
    half = mixed(dims, [3, 4, 5])
    half[0] += 1e-3
    assert prove(dims, module(dims, half)) is None


@pytest.mark.parametrize("dims", [1, 2])
def test_a_weight_that_is_all_old_is_no_ranks(dims):
    proof = prove(dims, module(dims, OLD[dims]))
    assert proof is not None
    assert (proof.component, proof.cause, proof.axes) == ("state", "stale", ())
    assert proof.candidates == ()


def test_rows_that_nobody_used_may_be_old_or_not(monkeypatch):
    """Only words of the first half occur, which the ranks with dp_shard=0 hold."""
    monkeypatch.setattr("tests.align.explain.test_old_shards.TOKENS", TOKENS % 6)
    proof = prove(2, module(2, mixed(2, [0, 1, 2])))
    assert proof is not None
    assert (proof.cause, proof.axes) == ("stale", ())
    assert "state/stale over dp_shard: " in proof.candidates[1]
    assert proof.separate_by is not None


def test_the_first_step_has_no_step_before():
    assert prove(2, module(2, mixed(2, [3, 4, 5])), step=0) is None


def test_every_place_of_the_mesh_is_told():
    for dp, cp in itertools.product(range(DP), range(CP)):
        proof = prove(1, module(1, mixed(1, [dp * CP + cp])))
        assert proof is not None
        assert f"dp_shard={dp}, cp={cp}" in proof.text
