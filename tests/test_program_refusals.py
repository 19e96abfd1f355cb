"""What a step of a program refuses: batches that are no share, gradients that are not final."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from paralign.config.run import RunConfig
from paralign.errors import AlignError, DataError
from paralign.loss import count_valid_tokens
from paralign.mesh import build_mesh
from paralign.models.rotary import rotary_tables
from paralign.parallelize import parallelize
from paralign.testing import run_on_ranks
from paralign.train.build import build_pieces, build_plans, build_program, numerics
from tests.test_program import BATCHES, config_of


def message_of(action: Any) -> str:
    try:
        action()
    except (AlignError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals(config: RunConfig) -> list[str]:
    mesh = build_mesh(config.mesh.degrees)
    program = build_program(config, numerics("float64", config), mesh=mesh)
    rank = mesh.get_rank()
    mine = BATCHES[0]
    other = {**mine, "tokens": mine["tokens"].clone()}
    other["tokens"][0, 0] += 1
    batch = program.shard(mine)
    narrow = {name: tensor[:, :12] for name, tensor in mine.items()}
    short = replace(batch, num_global_tokens=batch.num_global_tokens - 1)
    return [
        message_of(lambda: program.step(mine)),  # type: ignore[arg-type]
        message_of(lambda: program.step(batch, num_tokens=0)),
        message_of(lambda: program.step(program.shard(narrow if rank == 3 else mine))),
        message_of(lambda: program.step(program.shard(other if rank == 3 else mine))),
        message_of(lambda: program.step(short)),
    ]


@pytest.mark.ranks
def test_a_step_refuses_what_is_no_share_of_one_global_batch():
    config = config_of()
    total = int(count_valid_tokens(BATCHES[0]["labels"]))
    for messages in run_on_ranks(refusals, 4, config):
        assert messages == [
            "DataError: batch is a dict; step needs this rank's share of the global batch. Use "
            "program.step(program.shard(global_batch)).",
            "DataError: num_tokens=0 must be at least 1: token losses are divided by it. Pass the "
            "sum of num_global_tokens over the batches whose gradients are added.",
            # Another shape is found before ranks send each other tensors, other values after.
            *[
                "DataError: the ranks were given different global batches: rank 3: pp=1 dp_shard=1 "
                "differ from the others. Read the same global batch on every rank (one sampler "
                "seed, no rank offset); program.shard cuts it."
            ]
            * 2,
            f"DataError: the ranks hold {total} valid tokens of {total - 1} in the global batch. "
            "Pass step what program.shard returned, unchanged.",
        ]


def documents_for_a_blind_blueprint(config: RunConfig) -> str:
    mesh = build_mesh(config.mesh.degrees)
    model, blueprint = build_pieces(config, torch.float64)
    blueprint.takes_documents = False
    pipeline, fsdp, context = build_plans(config)
    program = parallelize(
        model, mesh, blueprint=blueprint, pipeline=pipeline, fsdp=fsdp, context=context
    )
    batch = {"tokens": BATCHES[0]["tokens"], "documents": BATCHES[0]["tokens"]}
    return message_of(lambda: program.shard(batch))


@pytest.mark.ranks
def test_documents_are_refused_where_nothing_would_look_at_them():
    config = config_of(mesh={})
    [message] = run_on_ranks(documents_for_a_blind_blueprint, 1, config)
    assert "the model's blueprint does not look at them: attention would cross them" in message


def run_with_extra(config: RunConfig, unused: tuple[str, ...]) -> list[str]:
    """Step a model whose third layer has a parameter that nothing uses."""
    mesh = build_mesh(config.mesh.degrees)
    model, blueprint = build_pieces(config, torch.float64)
    layer = model.get_submodule("layers.2")
    layer.register_parameter("extra", nn.Parameter(torch.empty(3, device="meta").double()))
    blueprint.unused_parameters = unused
    pipeline, fsdp, context = build_plans(config)
    program = parallelize(
        model, mesh, blueprint=blueprint, pipeline=pipeline, fsdp=fsdp, context=context
    )
    program.step(program.shard(BATCHES[0]))
    return [name for name, p in program.named_parameters() if p.grad is None]


@pytest.mark.ranks
def test_a_parameter_without_gradient_is_an_error_that_names_it():
    with pytest.raises(AlignError) as caught:
        run_on_ranks(run_with_extra, 4, config_of(), ())
    problem = (
        "layers.2.extra is trainable and got no gradient. Freeze it, or list it in the "
        "blueprint's unused_parameters"
    )
    # Every rank raises, and says which ranks own the parameter.
    assert str(caught.value) == (
        "[rank 0] gradients are not final:\n"
        f"  - [rank 2: pp=1 dp_shard=0] {problem}\n"
        f"  - [rank 3: pp=1 dp_shard=1] {problem}\n"
        "(the same on all 4 ranks)"
    )


@pytest.mark.ranks
def test_a_parameter_that_is_declared_unused_may_have_no_gradient():
    seen = run_on_ranks(run_with_extra, 4, config_of(), ("layers.*.extra",))
    assert seen == [[], [], ["layers.2.extra"], ["layers.2.extra"]]


def wrong_reductions(config: RunConfig) -> list[str]:
    """Reduce a unit twice, and after a sound step none at all."""
    program = build_program(config, numerics("float64", config))
    batch = program.shard(BATCHES[0])
    real = _PipelineStageBase.perform_reduce_grad

    def twice(stage: Any, factor: int) -> None:
        real(stage, factor)
        unit = stage.submod.get_submodule("layers.0")
        rotary = rotary_tables(torch.arange(2)[None], head_dim=8, theta=1e4)
        unit(torch.ones(1, 2, 32).double(), rotary).sum().backward()

    program.step(batch)
    with mock.patch.object(_PipelineStageBase, "perform_reduce_grad", twice):
        more = message_of(lambda: program.step(batch))
    with mock.patch.object(_PipelineStageBase, "perform_reduce_grad", lambda stage, factor: None):
        none = message_of(lambda: program.step(batch))
    return [more, none]


@pytest.mark.ranks
def test_reductions_that_are_not_one_are_an_error_that_names_the_unit():
    config = config_of(mesh={}, fsdp={"wrap": "first_block"})
    ((more, none),) = run_on_ranks(wrong_reductions, 1, config)
    assert more == (
        "AlignError: gradients are not final:\n"
        "  - [rank 0] unit 'stage 0: layers.0' reduced its gradients 2 times in one step instead "
        "of once"
    )
    # Every parameter has a gradient, but it is that of the steps before.
    assert none == (
        "AlignError: gradients are not final:\n"
        "  - [rank 0] unit 'stage 0: layers.0' reduced its gradients 0 times in one step instead "
        "of once\n"
        "  - [rank 0] unit 'stage 0: root' reduced its gradients 0 times in one step instead of "
        "once"
    )
