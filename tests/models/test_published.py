from __future__ import annotations

import math

import pytest

from paralign.models.published import Layout, Part, Placed, Stacks, same
from paralign.models.registry import MODELS
from tests.weights.published import deepseek, dense, mixtral


@pytest.mark.parametrize("family", [dense(), mixtral(), deepseek()])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_parts_cover_every_tensor_of_either_side_once(family, is_stacked) -> None:
    name, config = family
    names = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in range(3)] if is_stacked else []
    layout = MODELS[name].published.layout(config, names, {})
    for by_name, shapes in ((layout.by_ours, layout.ours), (layout.by_theirs, layout.theirs)):
        assert set(by_name) == set(shapes)
        for tensor, parts in by_name.items():
            assert sum(math.prod(part.shape) for part in parts) == math.prod(shapes[tensor])
    for part in layout.parts:
        assert part.order is None or sorted(part.order) == list(range(part.shape[0]))


def test_our_side_is_what_the_model_has() -> None:
    for family in (dense(), dense(tie_embeddings=True), mixtral(), deepseek()):
        name, config = family
        model = MODELS[name].build(config)
        layout = MODELS[name].published.layout(config, (), {})
        found = {n: tuple(p.shape) for n, p in model.named_parameters()}
        found |= {n: tuple(b.shape) for n, b in model.named_buffers() if n.endswith("bias")}
        assert layout.ours == found


def test_shapes_follow_from_the_parts() -> None:
    stacks = Stacks(gate="g.{}", up="u.{}", down="d.{}", gate_up="gu", downs="ds")
    parts = stacks.parts("e", num_experts=3, inner=5, outer=7, is_stacked=True)
    layout = Layout((*parts, same("a", "b", 2)))
    assert layout.ours == {"e.gate": (3, 5, 7), "e.up": (3, 5, 7), "e.down": (3, 7, 5), "a": (2,)}
    assert layout.theirs == {"gu": (3, 10, 7), "ds": (3, 7, 5), "b": (2,)}
    each = stacks.parts("e", num_experts=3, inner=5, outer=7, is_stacked=False)
    assert each[1] == Part(Placed("e.gate", (1, 0, 0)), Placed("g.1", (0, 0)), (5, 7))
    zero = Layout((same("a", "b", 2),), zeros=frozenset({"a"}))
    assert (zero.ours, zero.theirs) == ({}, {"b": (2,)})
