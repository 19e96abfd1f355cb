from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.mesh import Degrees, build_mesh
from paralign.parallel.data import FSDP
from paralign.parallel.pipeline import Pipeline
from paralign.parallelize import parallelize
from paralign.randomness import Init
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_pieces,
    build_program,
    init_rule,
    initialise_whole,
    numerics,
)
from tests import parity
from tests.parity import LOSS_TOLERANCE, make_config

CONFIG = make_config(mesh={"pp": 2, "dp_shard": 2}, batch={"global_batch": 8, "seq_len": 8})


def pieces(**model: Any) -> tuple[nn.Module, Blueprint]:
    return build_pieces(make_config(model={**parity.BASE["model"], **model}), torch.float32)


class NoAttention(Blueprint):
    """A blueprint that names no attention core."""

    def __init__(self, real: Blueprint) -> None:
        self.real = real

    def context(self, batch, *, seq_len):
        return self.real.context(batch, seq_len=seq_len)

    def prologue(self, pieces, batch, context):
        return self.real.prologue(pieces, batch, context)

    def layer(self, layer, x, context):
        return self.real.layer(layer, x, context)

    def epilogue(self, pieces, x, context):
        return self.real.epilogue(pieces, x, context)


def message_of(model: nn.Module, mesh: Any, blueprint: Blueprint, **plans: Any) -> str:
    plans.setdefault("pipeline", Pipeline("GPipe"))
    try:
        parallelize(model, mesh, blueprint=blueprint, **plans)
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals() -> dict[str, str]:
    mesh = build_mesh(Degrees(cp=2))
    rank = mesh.get_rank()
    seen = {}
    model, blueprint = pieces()
    seen["no core"] = message_of(model, mesh, NoAttention(blueprint))
    wrap = [["layers.0", "attention.wq"], ["layers.0.attention"], ["nothing"]]
    seen["units"] = message_of(model, mesh, blueprint, fsdp=FSDP(wrap=wrap))
    blueprint.epilogue_names = ("norm",)
    seen["blueprint"] = message_of(model, mesh, blueprint)

    model, blueprint = pieces()
    model.get_submodule("norm").register_buffer("scale", torch.ones(1, device="meta"))
    seen["buffer"] = message_of(model, mesh, blueprint)

    for what in ("weights", "buffers"):
        model, blueprint = pieces()
        initialise_whole(model, blueprint.init, seed=0)
        model.get_submodule("norm").register_buffer("scale", torch.ones(1))
        if rank == 1 and what == "weights":
            with torch.no_grad():  # a permutation, which a plain sum would not see
                weight = model.get_parameter("layers.1.ffn.up.weight")
                weight.copy_(weight.flip(0))
        if rank == 1 and what == "buffers":
            model.get_buffer("norm.scale").add_(1)
        seen[what] = message_of(model, mesh, blueprint)
    seen["equal"] = message_of(*real(seed=0, mesh=mesh))
    return seen


def real(*, seed: int, mesh: Any) -> tuple[nn.Module, Any, Blueprint]:
    model, blueprint = pieces()
    return initialise_whole(model, blueprint.init, seed=seed), mesh, blueprint


@pytest.mark.ranks
def test_what_does_not_fit_the_model_is_refused_on_every_rank():
    for seen in run_on_ranks(refusals, 2):
        assert seen == {
            "no core": (
                "ConfigError: the blueprint names no attention core, and axis 'cp' has 2 ranks. "
                "Return it from Blueprint.attention(), or use cp=1."
            ),
            "units": (
                "LayoutError: fsdp wrap lists units that cannot be made:\n"
                "  - 'attention.wq' matches no module of the model. Did you mean "
                "'layers.0.attention.wq'?\n"
                "  - 'layers.0.attention' and 'layers.0' overlap: a parameter belongs to one "
                "unit.\n"
                "  - 'nothing' matches no module of the model."
            ),
            "blueprint": (
                "ConfigError: LlamaBlueprint does not describe Llama: no piece owns head.weight, "
                "head.bias. Add the module or the parameter to prologue_names or epilogue_names, "
                "or move it into a layer."
            ),
            "buffer": (
                "ConfigError: the model is on the meta device and has buffers, whose values would "
                "be lost. Build it on a real device, or compute them in the blueprint's context."
            ),
            "weights": (
                "ConfigError: the initial weights differ between ranks: layers.1.ffn.up.weight on "
                "rank 1: cp=1 is not what it is on rank 0: cp=0. Build the model from one seed on "
                "every rank, or on the meta device."
            ),
            "buffers": (
                "ConfigError: the initial weights differ between ranks: norm.scale on rank 1: "
                "cp=1 is not what it is on rank 0: cp=0. Build the model from one seed on every "
                "rank, or on the meta device."
            ),
            "equal": "nothing was raised",
        }


Values = dict[str, Tensor]


def shards_that_differ(program: Any, whole: Values) -> list[str]:
    """Return the names of this rank's parameters that are not slices of ``whole``."""
    wrong = []
    for name, parameter in program.named_parameters():
        local = parameter.detach().to_local()
        expected = whole[program.tied_aliases.get(name, name)]
        if not torch.equal(local, parity._slice(parameter, local, expected)):
            wrong.append(name)
    return wrong


def start(config: RunConfig, whole: Values, own: Values, mesh: Any) -> dict[str, list[str]]:
    program = build_program(config, numerics("float64", config), mesh=mesh)
    seen = {"meta": shards_that_differ(program, whole)}
    model, blueprint = build_pieces(config, torch.float64)
    initialise_whole(model, blueprint.init, seed=0)
    model.load_state_dict(own)
    pipeline = Pipeline(config.pipeline.schedule, num_microbatches=4)
    program = parallelize(model, mesh, blueprint=blueprint, pipeline=pipeline, seed=5)
    seen["real"] = shards_that_differ(program, own)
    model, blueprint = build_pieces(config, torch.float64)
    program = parallelize(
        model,
        mesh,
        blueprint=blueprint,
        pipeline=pipeline,
        init=lambda name, shape: Init.constant(len(name)),
    )
    lengths = {name: torch.full(value.shape, len(name)).double() for name, value in whole.items()}
    seen["rule"] = shards_that_differ(program, lengths)
    return seen


def start_all(cases: list[tuple[RunConfig, Values, Values]]) -> list[dict[str, list[str]]]:
    mesh = build_mesh(cases[0][0].mesh.degrees)
    return [start(*case, mesh) for case in cases]


def weights_of_one_device(config: RunConfig) -> tuple[Values, Values]:
    """Return the weights that paralign makes, and others."""
    model, blueprint = build_pieces(config, torch.float64)
    initialise_whole(model, init_rule(config, blueprint), seed=0)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    torch.manual_seed(7)
    own = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    if config.model.model_dump()["tie_embeddings"]:
        own["head.weight"] = own["embedding.weight"]
    return whole, own


@pytest.mark.ranks
def test_every_rank_starts_from_its_part_of_the_same_weights():
    # A tied pair is on two ranks with 1F1B and on one with a V.
    configs = [
        make_config(
            model={**parity.BASE["model"], "tie_embeddings": tied},
            mesh={"pp": 2, "dp_shard": 2},
            pipeline={"schedule": schedule, "num_microbatches": 4},
        )
        for schedule in ("1F1B", "ZBVZeroBubble")
        for tied in (False, True)
    ]
    cases = [(config, *weights_of_one_device(config)) for config in configs]
    for outcome in run_on_ranks(start_all, 4, cases):
        for seen in outcome:
            assert seen == {"meta": [], "real": [], "rule": []}


# Largest relative gradient error against one device with the same arithmetic, in eps of the compute
# dtype, and the smallest: a run that computes in another dtype is far off, or not off at all.
PRECISIONS = {
    "float64": (0.0, 30.0, torch.float64),
    "float32": (0.05, 30.0, torch.float32),
    "bfloat16": (0.01, 6.0, torch.bfloat16),
}


@pytest.mark.ranks
@pytest.mark.long
def test_every_precision_is_near_one_device_with_the_same_arithmetic():
    configs = [
        make_config(
            mesh={"pp": 2, "dp_shard": 2, "cp": 2},
            pipeline={"schedule": "1F1B", "num_microbatches": 2},
            align={"dtype": name},
        )
        for name in PRECISIONS
    ]
    results = parity.measure_all(configs)
    for result, (low, high, dtype) in zip(results, PRECISIONS.values(), strict=True):
        eps = torch.finfo(dtype).eps
        error, where = result.worst("grad:0")
        assert low <= error / eps <= high, (dtype, error / eps, where)
        assert result.loss_error <= max(LOSS_TOLERANCE, 4 * eps)
        assert not result.missing
