from __future__ import annotations

import torch

from paralign.train.optimizer import build_optimizer
from tests.parity import make_config


def test_optimizers_get_every_setting():
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = make_config(
        optimizer={"lr": 0.5, "betas": [0.5, 0.75], "eps": 1e-3, "weight_decay": 0.25}
    )
    made = build_optimizer(adam.optimizer, iter([("w", parameter)]))
    assert isinstance(made, torch.optim.AdamW)
    (group,) = made.param_groups
    assert group["params"] == [parameter]
    settings = [group[key] for key in ("lr", "betas", "eps", "weight_decay")]
    assert settings == [0.5, (0.5, 0.75), 1e-3, 0.25]

    sgd = make_config(optimizer={"name": "sgd", "lr": 0.5, "momentum": 0.75, "weight_decay": 0.25})
    made = build_optimizer(sgd.optimizer, [("w", parameter)])
    assert isinstance(made, torch.optim.SGD)
    (group,) = made.param_groups
    assert [group[key] for key in ("lr", "momentum", "weight_decay")] == [0.5, 0.75, 0.25]


def test_decay_of_matrices_spares_norms_and_biases_stacked_ones_as_well():
    section = make_config(optimizer={"weight_decay": 0.25, "decay": "matrices"}).optimizer
    shapes = {
        "embed.weight": (4, 2),
        "layers.0.norm.weight": (2,),
        "layers.0.ffn.up.bias": (3,),
        "layers.0.ffn.experts.up": (2, 3, 2),
        "layers.0.ffn.experts.up_bias": (2, 3),
    }
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    decayed, spared = build_optimizer(section, named.items()).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in named.items()}
    assert [names[id(p)] for p in decayed["params"]] == ["embed.weight", "layers.0.ffn.experts.up"]
    assert [names[id(p)] for p in spared["params"]] == [
        "layers.0.norm.weight",
        "layers.0.ffn.up.bias",
        "layers.0.ffn.experts.up_bias",
    ]
