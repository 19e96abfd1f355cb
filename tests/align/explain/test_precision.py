"""Where sums in a narrow dtype were made: on a rank, or over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paralign.align.explain import precision
from tests.align.explain.test_context import mesh_of

TWO, HALVES = {0: (0, 1), 1: (1, 2)}, {0: (0, 1), 1: (1, 2), 2: (0, 1), 3: (1, 2)}


@pytest.mark.parametrize(
    ("dp_shard", "own", "component"),
    [
        (2, TWO, "backward"),  # every token comes to the one rank that has an expert
        (2, HALVES, "reduction"),  # over efsdp
        (2, {}, "reduction"),
        (1, {}, "backward"),
    ],
)
def test_a_gradient_that_is_not_reduced_was_added_up_on_its_rank(
    monkeypatch, dp_shard, own, component
):
    monkeypatch.setattr(precision, "experts_of_ranks", lambda context, module: own)
    context: Any = SimpleNamespace(mesh=mesh_of(pp=2, dp_shard=dp_shard, tp=2, ep=2))
    item: Any = SimpleNamespace(row=SimpleNamespace(name="layers.0.ffn.experts.up"))
    proof = precision._proof_of_sums(context, item, "bfloat16", 1.0)
    assert (proof.component, proof.cause) == (component, "precision")
