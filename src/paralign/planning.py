"""Settles a plan before anything is built: which stage owns what, and every rule it must keep.

All of it looks at names, shapes and settings; a model on the meta device will do, and no ranks.
``parallelize`` goes through it on every rank, and ``paralign check`` without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from paralign.blueprint import Blueprint
from paralign.dropout import foreign_dropouts, name_dropouts
from paralign.errors import ConfigError, ScheduleError
from paralign.mesh import Degrees
from paralign.parallel.compiled import Compile
from paralign.parallel.data import FSDP, Precision, check_units, plan_units
from paralign.parallel.expert import ExpertParallel
from paralign.parallel.loss_chunks import head_problems
from paralign.parallel.pipeline import Pipeline
from paralign.parallel.precision import precision_problems
from paralign.parallel.recompute import Recompute, recompute_problems
from paralign.parallel.stages import split_layers
from paralign.parallel.support import Plan, problems, resolve_reshard
from paralign.parallel.tensor import tensor_problems
from paralign.parallel.tensor_base import TensorParallel
from paralign.parallel.tied import check_pairs, check_units_of_pairs, find_tied


def settle_plan(
    model: nn.Module,
    degrees: Degrees,
    blueprint: Blueprint,
    *,
    pipeline: Pipeline,
    fsdp: FSDP,
    precision: Precision,
    tensor: TensorParallel,
    recompute: Recompute,
    loss_chunks: int,
    compiling: Compile | None = None,
) -> Plan:
    """Hold a plan against every rule and fill in what the user left open.

    Every :class:`paralign.Dropout` of ``model`` gets its name.

    Raises:
        ConfigError: A rule is broken; all problems of that rule are listed.
    """
    plan = resolve_plan(
        model,
        degrees,
        blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        precision=precision,
        loss_chunks=loss_chunks,
        recompute=recompute,
        compiling=compiling,
    )
    if found := foreign_dropouts(model):
        raise ConfigError.from_problems("dropout would differ from mesh to mesh", found)
    check_sharding(model, blueprint, plan, fsdp)
    check_tensor_plan(model, blueprint, degrees, tensor)
    check_experts(model, blueprint, degrees)
    check_loss_chunks(model, blueprint, loss_chunks)
    check_precision(model, blueprint, precision)
    check_recompute(model, blueprint, recompute)
    check_compile(blueprint, plan, degrees, recompute)
    name_dropouts(model)
    return plan


def resolve_plan(
    model: nn.Module,
    degrees: Degrees,
    blueprint: Blueprint,
    *,
    pipeline: Pipeline,
    fsdp: FSDP,
    precision: Precision,
    loss_chunks: int = 1,
    recompute: Recompute | None = None,
    compiling: Compile | None = None,
) -> Plan:
    """Check the plan against the support table and fill in what the user left open.

    Raises:
        ScheduleError: The plan is refused; all reasons are listed.
    """
    master = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    plan = Plan(
        schedule=pipeline.schedule,
        num_microbatches=pipeline.num_microbatches,
        pp=degrees.pp,
        stages_per_rank=pipeline.stages_per_rank,
        num_layers=len(model.get_submodule(blueprint.layers_name)._modules),
        layers_per_stage=pipeline.layers_per_stage,
        wrap=fsdp.wrap,
        reshard_after_forward=fsdp.reshard_after_forward,
        has_expert_units=degrees.spreads_experts and bool(all_experts(model, blueprint)),
        compute_dtype=_dtype_name(precision.compute or master),
        reduce_dtype=_dtype_name(precision.reduce or master),
        loss_chunks=loss_chunks,
        recomputes=(recompute or Recompute()).parts != "none",
        compiles=(compiling or Compile()).is_on,
    )
    if refused := problems(plan):
        raise ScheduleError.from_problems(f"the plan is refused on {degrees}", refused)
    return replace(plan, reshard_after_forward=resolve_reshard(plan))


def stage_of_parameters(model: nn.Module, blueprint: Blueprint, plan: Plan) -> dict[str, int]:
    """Return the stage that owns each parameter, for every name that a parameter has."""
    assert plan.num_layers is not None
    splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
    owner_of_piece = dict.fromkeys(blueprint.prologue_names, 0)
    owner_of_piece.update(dict.fromkeys(blueprint.epilogue_names, plan.num_stages - 1))
    for stage, layers in enumerate(splits):
        owner_of_piece.update((f"{blueprint.layers_name}.{index}", stage) for index in layers)
    owners = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        piece = next(p for p in owner_of_piece if name == p or name.startswith(f"{p}."))
        owners[name] = owner_of_piece[piece]
    return owners


def check_sharding(model: nn.Module, blueprint: Blueprint, plan: Plan, fsdp: FSDP) -> None:
    """Check that every parameter will belong to exactly one FSDP unit of each stage that uses it.

    Raises:
        LayoutError: Listed units name modules that do not exist or overlap, or a tied parameter is
            in two units.
        ConfigError: A parameter has more than two names.
    """
    assert plan.num_layers is not None
    names = [name for name, _ in model.named_modules() if name]
    check_units(fsdp.wrap, names)
    owners, aliases = stage_of_parameters(model, blueprint, plan), find_tied(model)
    check_pairs(aliases, owners)
    splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
    units = {
        stage: plan_units(fsdp.wrap, [f"{blueprint.layers_name}.{i}" for i in layers], names)
        for stage, layers in enumerate(splits)
    }
    check_units_of_pairs(aliases, owners, units)


def check_recompute(model: nn.Module, blueprint: Blueprint, recompute: Recompute) -> None:
    """Check that what is to be recomputed exists in some layer.

    Raises:
        ConfigError: It does not; all names are listed.
    """
    layers = model.get_submodule(blueprint.layers_name).children()
    if found := recompute_problems(layers, recompute):
        raise ConfigError.from_problems("cannot recompute", found)


def check_compile(blueprint: Blueprint, plan: Plan, degrees: Degrees, recompute: Recompute) -> None:
    """Check that layers can be compiled beside everything else.

    Raises:
        ConfigError: They cannot; all reasons are listed.
    """
    if not plan.compiles:
        return
    found = []
    if degrees.tp > 1:
        found.append(
            f"axis 'tp' has {degrees.tp} ranks: every matrix of a layer is multiplied between two "
            "collectives, which cannot be traced, so that next to nothing would be compiled. Use "
            "tp=1, or no compiler"
        )
    if not isinstance(recompute.parts, str):
        found.append(
            f"recompute parts={list(recompute.parts)} are calls inside of a layer, which a graph "
            "does not make. Use parts='block', or no compiler"
        )
    if not isinstance(plan.wrap, str):
        prefix = f"{blueprint.layers_name}."
        inner = [
            name
            for unit in plan.wrap
            for name in unit
            if name.startswith(prefix) and "." in name.removeprefix(prefix)
        ]
        if inner:
            found.append(
                f"fsdp wrap has units inside of layers ({', '.join(inner)}), which gather their "
                "parameters in the middle of a graph. List whole layers, or use no compiler"
            )
    if found:
        raise ConfigError.from_problems("layers cannot be compiled", found)


def check_tensor_plan(
    model: nn.Module, blueprint: Blueprint, degrees: Degrees, tensor: TensorParallel
) -> None:
    """Check that the blueprint's plan spreads every parameter over tp.

    Raises:
        ConfigError: All problems are listed.
    """
    if degrees.tp == 1:
        return
    if found := tensor_problems(
        model,
        blueprint.tensor_parallel(),
        degree=degrees.tp,
        options=tensor,
        experts=list(all_experts(model, blueprint)),
    ):
        title = f"{type(model).__name__} cannot be spread over axis 'tp' ({degrees.tp} ranks)"
        raise ConfigError.from_problems(title, found)


def check_loss_chunks(model: nn.Module, blueprint: Blueprint, loss_chunks: int) -> None:
    """Check that the loss can be computed in chunks.

    Raises:
        ConfigError: It cannot, and why.
    """
    if loss_chunks < 1:
        raise ConfigError(f"loss_chunks={loss_chunks} must be at least 1. Use 1 for no chunks.")
    if loss_chunks == 1:
        return
    if found := head_problems(model, blueprint, f"loss_chunks={loss_chunks}"):
        raise ConfigError.from_problems("the loss cannot be computed in chunks", found)


def check_precision(model: nn.Module, blueprint: Blueprint, precision: Precision) -> None:
    """Check that every part that is to stay in float32 can.

    Raises:
        ConfigError: All problems are listed.
    """
    found = precision_problems(model, blueprint, precision)
    if precision.logits is not None:
        found += head_problems(model, blueprint, "logits=float32")
    if found:
        raise ConfigError.from_problems("the precision cannot be honoured", found)


def expert_stacks(
    root: nn.Module, blueprint: Blueprint, layer_names: Sequence[str]
) -> dict[str, ExpertParallel]:
    """Return the stacks of experts in some layers of ``root``, by global name."""
    known = {name for name, _ in root.named_modules()}
    return {
        f"{layer}.{inner}": style
        for layer in layer_names
        for inner, style in blueprint.experts().items()
        if f"{layer}.{inner}" in known
    }


def all_experts(model: nn.Module, blueprint: Blueprint) -> dict[str, ExpertParallel]:
    """Return the stacks of experts in all layers of ``model``, by global name."""
    layers = model.get_submodule(blueprint.layers_name)._modules
    return expert_stacks(model, blueprint, [f"{blueprint.layers_name}.{i}" for i in layers])


def check_experts(model: nn.Module, blueprint: Blueprint, degrees: Degrees) -> None:
    """Check that the blueprint's experts can be spread over ep.

    Raises:
        ConfigError: All problems are listed.
    """
    if not degrees.spreads_experts:
        return
    stacks = all_experts(model, blueprint)
    found = [
        f"{name}: {problem}"
        for name, style in stacks.items()
        for problem in style.problems(model.get_submodule(name), degrees.ep)
    ]
    if not stacks and degrees.ep > 1:
        found = [
            f"experts() names no module that any layer has, and axis 'ep' has {degrees.ep} ranks. "
            "Name the stacks of experts in a layer, or use ep=1"
        ]
    if found:
        title = f"{type(blueprint).__name__} cannot spread experts over 'ep'"
        raise ConfigError.from_problems(title, found)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
