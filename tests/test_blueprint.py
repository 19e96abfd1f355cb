from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.randomness import Init


class Least(Blueprint):
    """Only what must be written."""

    def context(self, batch: Any, *, seq_len: int) -> None:
        return None

    def prologue(self, pieces: Any, batch: Any, context: None) -> Tensor:
        embedded: Tensor = pieces.embedding(batch["tokens"])
        return embedded

    def layer(self, layer: nn.Module, x: Tensor, context: None) -> Tensor:
        out: Tensor = layer(x)
        return out

    def epilogue(self, pieces: Any, x: Tensor, context: None) -> Tensor:
        logits: Tensor = pieces.head(x)
        return logits


def test_what_must_be_written():
    with pytest.raises(TypeError, match="abstract"):
        Blueprint()  # type: ignore[abstract]
    assert Blueprint.__abstractmethods__ == {"context", "prologue", "layer", "epilogue"}


def test_defaults_name_the_usual_pieces():
    blueprint = Least()
    assert blueprint.prologue_names == ("embedding",)
    assert blueprint.layers_name == "layers"
    assert blueprint.epilogue_names == ("norm", "head")
    assert blueprint.unused_parameters == ()
    assert blueprint.attention() == {}


def test_the_reference_runs_the_models_own_forward():
    class Model(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens * 2

    tokens = torch.arange(3)
    logits = Least().forward(Model(), {"tokens": tokens, "positions": tokens})
    assert torch.equal(logits, tokens * 2)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.wq.weight", (4, 4), Init.normal(std=0.02)),
        ("embedding.weight", (256, 4), Init.normal(std=0.02)),
        ("norm.weight", (4,), Init.constant(1.0)),
        ("scale", (), Init.constant(1.0)),
        ("norm.bias", (4,), Init.constant(0.0)),
        ("layers.0.experts.bias", (8, 4), Init.constant(0.0)),
    ],
)
def test_how_parameters_start_by_default(name, shape, expected):
    assert Least().init(name, shape) == expected
