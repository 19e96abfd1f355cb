"""``paralign check``: what a plan will do, shown before a rank starts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paralign.config.model_choice import build_model
from paralign.config.run import RunConfig
from paralign.declaration import ParameterDeclaration, declare
from paralign.errors import ConfigError
from paralign.models.compose import structure_problems
from paralign.parallel.data import Precision, check_units
from paralign.parallel.support import Plan, rules
from paralign.parallelize import resolve_plan
from paralign.prove.build import build_plans
from paralign.prove.cost import RankCost, estimate


def describe_plan(config: RunConfig, *, verbose: bool = False) -> RenderableType:
    """Describe the plan of ``config``: support table, cost of every rank, declared reductions.

    Args:
        config: A config that keeps every static rule.
        verbose: List every parameter, instead of one row for the same parameter of all layers.

    Raises:
        ConfigError: The blueprint does not describe the model, or units name modules it lacks.
    """
    with torch.device("meta"):
        model, blueprint = build_model(config.model)
    if found := structure_problems(model, blueprint):
        raise ConfigError.from_problems("the blueprint does not describe the model", found)
    pipeline, fsdp, _ = build_plans(config)
    check_units(fsdp.wrap, [name for name, _ in model.named_modules() if name])
    precision = Precision(
        compute=getattr(torch, config.precision.compute),
        reduce=getattr(torch, config.precision.reduce),
    )
    degrees = config.mesh.degrees
    plan = resolve_plan(
        model, degrees, blueprint, pipeline=pipeline, fsdp=fsdp, precision=precision
    )
    declared = declare(model, blueprint, degrees=degrees, plan=plan, fsdp=fsdp)
    costs = estimate(model, blueprint, config=config, plan=plan, declared=declared)
    return Group(
        _title(config, plan, declared),
        _support(config, plan),
        Text(),
        _memory(costs),
        Text(),
        _traffic(costs),
        Text(),
        _reductions(declared, verbose=verbose),
    )


def _title(config: RunConfig, plan: Plan, declared: Sequence[ParameterDeclaration]) -> Text:
    degrees = config.mesh.degrees
    name = config.model.name or config.model.build
    sizes = torch.tensor([torch.Size(p.shape).numel() for p in declared if not p.tied_to])
    return Text.assemble(
        ("plan ", "bold"),
        f"{name}, {_count(int(sizes.sum()))} parameters, on {degrees.world_size} ranks "
        f"({degrees}), {plan.kind.name} with {plan.num_microbatches} micro-batches",
    )


def _support(config: RunConfig, plan: Plan) -> RenderableType:
    # The plan is resolved: what was repaired is seen in the plan as it was asked for.
    asked = Plan(
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        pp=plan.pp,
        stages_per_rank=config.pipeline.stages_per_rank,
        wrap=config.fsdp.wrap,
        reshard_after_forward=config.fsdp.reshard,
        compute_dtype=plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
    )
    found = rules(asked)
    if not found:
        return Text.assemble(("support ", "bold"), "the plan runs as asked")
    lines = [
        Text.assemble(
            ("support ", "bold"), (rule.decision.value, "yellow"), f" {rule.reason} {rule.fix}"
        )
        for rule in found
    ]
    return Group(*lines)


def _memory(costs: Sequence[RankCost]) -> Table:
    table = _table("memory per rank, without activations")
    table.add_column("pp rank")
    table.add_column("layers")
    for title in ("parameters", "shards", "gathered", "waiting gradients"):
        table.add_column(title, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.pp_rank),
            ", ".join(_span(layers) for layers in cost.layers),
            _count(cost.num_parameters),
            _bytes(cost.state_bytes),
            _bytes(cost.gathered_bytes),
            _bytes(cost.gradient_bytes),
        )
    table.caption = (
        "shards: weights, gradients and optimizer state in float32; gathered: unsharded weights "
        "at one "
        "time; waiting gradients: unsharded, until the last micro-batch"
    )
    return table


def _traffic(costs: Sequence[RankCost]) -> Table:
    table = _table("communication per rank and step")
    for title in ("pp rank", "what", "collective", "axis"):
        table.add_column(title)
    for title in ("calls", "bytes"):
        table.add_column(title, justify="right")
    for cost in costs:
        for number, item in enumerate(cost.traffic):
            most = "<= " if item.at_most else ""
            table.add_row(
                str(cost.pp_rank) if number == 0 else "",
                item.what,
                item.collective,
                item.axis,
                f"{most}{item.calls}",
                f"{most}{_bytes(item.num_bytes)}",
                end_section=number == len(cost.traffic) - 1,
            )
    return table


def _reductions(declared: Sequence[ParameterDeclaration], *, verbose: bool) -> Table:
    table = _table("every gradient: what it is a sum of, reduced once a step")
    for title in ("parameter", "shape", "stage", "unit", "placement", "summed over"):
        table.add_column(title, overflow="fold")
    rows: dict[tuple[str, ...], list[int]] = {}
    for p in declared:
        hide = (lambda name: name) if verbose else _hide_index
        summed = " x ".join(p.partial_over) or "-"
        if p.tied_to:
            summed += f", and with {p.tied_to}"
        key = (
            hide(p.name),
            "x".join(map(str, p.shape)),
            hide(p.unit) or "root",
            ", ".join(f"{axis}: {how}" for axis, how in p.placements.items()) or "whole",
            summed if p.trainable else "frozen",
        )
        rows.setdefault(key, []).append(p.stage)
    for (name, shape, unit, placement, summed), stages in rows.items():
        at = f"{min(stages)}-{max(stages)}" if len(set(stages)) > 1 else str(stages[0])
        table.add_row(*(Text(cell) for cell in (name, shape, at, unit, placement, summed)))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left")


def _hide_index(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$|\+)", ".*", name)


def _span(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
