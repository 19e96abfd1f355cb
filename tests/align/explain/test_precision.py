"""Where sums in a narrow dtype were made: on a rank, or over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paralign.align.explain import precision
from tests.align.explain.test_context import mesh_of


@pytest.mark.parametrize(
    ("mesh", "is_expert", "component"),
    [
        ({"dp_shard": 3, "tp": 2, "ep": 6}, True, "backward"),  # every token comes to it
        ({"dp_shard": 3, "tp": 2, "ep": 3}, True, "reduction"),  # over efsdp
        ({"dp_shard": 3, "tp": 2, "ep": 6}, False, "reduction"),
        ({"dp_shard": 1, "tp": 2, "ep": 2}, False, "backward"),
    ],
)
def test_a_gradient_that_is_not_reduced_was_added_up_on_its_rank(
    monkeypatch, mesh, is_expert, component
):
    stack = {0: (0, 1), 1: (1, 2)} if is_expert else {}
    monkeypatch.setattr(precision, "experts_of_ranks", lambda context, module: stack)
    context: Any = SimpleNamespace(mesh=mesh_of(pp=2, **mesh))
    item: Any = SimpleNamespace(row=SimpleNamespace(name="layers.0.ffn.experts.up"))
    proof = precision._proof_of_sums(context, item, "bfloat16", 1.0)
    assert (proof.component, proof.cause) == (component, "precision")
