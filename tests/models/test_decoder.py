"""What the blueprints of paralign's own decoders share."""

from __future__ import annotations

import pytest
import torch

from paralign.randomness import fill_
from tests.models.helpers import batch, tiny


@pytest.mark.parametrize("name", ["llama", "pangu_moe"])
def test_pieces_run_one_after_the_other_are_the_models_forward(name):
    model, config, blueprint = tiny(name, bias=True)
    data = batch()
    context = blueprint.context(data, seq_len=16)
    x = blueprint.prologue(model, data, context)
    assert x.shape == (2, 16, config.hidden_size)
    for layer in model.get_submodule("layers").children():
        x = blueprint.layer(layer, x, context)
    logits = blueprint.epilogue(model, x, context)
    assert logits.shape == (2, 16, config.vocab_size)
    assert torch.equal(logits, model(data["tokens"]))
    assert torch.equal(logits, blueprint.forward(model, data))


@pytest.mark.parametrize("name", ["llama", "pangu_moe"])
def test_initial_activations_stay_level_with_depth(name):
    model, _, blueprint = tiny(name, num_layers=16)
    for parameter_name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        fill_(
            parameter,
            blueprint.init(parameter_name, shape),
            seed=0,
            name=parameter_name,
            global_shape=shape,
            offsets=(0,) * len(shape),
        )
    logits = model(batch()["tokens"])
    # Normed features times weights of 0.02: about 0.02 * sqrt(hidden_size) = 0.16 at any depth.
    assert 0.1 < logits.std().item() < 0.25
