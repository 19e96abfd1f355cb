"""``paralign check``: what a plan will do, shown before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paralign.config.model_choice import build_model
from paralign.config.notices import notices
from paralign.config.run import RunConfig
from paralign.declaration import ParameterDeclaration, declare
from paralign.errors import ConfigError
from paralign.mesh import MESH_AXES, Axis
from paralign.models.compose import structure_problems
from paralign.parallel.compiled import Compile
from paralign.parallel.support import Plan, rules
from paralign.planning import settle_plan
from paralign.prove.cost import RankCost, estimate
from paralign.prove.rows import ranges, rows_of
from paralign.train.build import (
    build_plans,
    build_precision,
    build_recompute,
    build_tensor,
    check_documents,
)
from paralign.train.flops import ModelFlops, count_flops
from paralign.train.freeze import freeze
from paralign.train.metrics import describe_flops


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
    check_documents(config, blueprint)
    freeze(model, config.optimizer.freeze)
    pipeline, fsdp, _ = build_plans(config)
    precision = build_precision(config)
    degrees = config.mesh.degrees
    tensor = build_tensor(config)
    plan = settle_plan(
        model,
        degrees,
        blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        precision=precision,
        tensor=tensor,
        recompute=build_recompute(config),
        compiling=Compile(backend=config.compile.backend),
        loss_chunks=config.loss.chunks,
    )
    declared = declare(model, blueprint, degrees=degrees, plan=plan, fsdp=fsdp, tensor=tensor)
    costs = estimate(model, blueprint, config=config, plan=plan, declared=declared)
    flops = count_flops(model, blueprint, seq_len=config.batch.seq_len)
    return Group(
        _summary(config, plan, declared, flops=flops),
        _heading("memory per rank: shards, in float32"),
        _state(costs),
        _heading("memory per rank beside these, at most"),
        _passing(costs),
        _heading("communication per rank and step"),
        _traffic(costs),
        _heading("communication by axis, of the rank that sends most"),
        _by_axis(costs),
        _heading("every gradient: what it is a sum of, reduced once a step"),
        *_reductions(declared, verbose=verbose),
    )


def _summary(
    config: RunConfig,
    plan: Plan,
    declared: Sequence[ParameterDeclaration],
    *,
    flops: ModelFlops,
) -> RenderableType:
    degrees = config.mesh.degrees
    active = flops.active_parameters
    name = config.model.name or config.model.build
    size = sum(math.prod(p.shape) for p in declared if not p.tied_to)
    shown = (*MESH_AXES, Axis.EP)
    axes = [f"{axis}={degrees.degree(axis)}" for axis in shown if degrees.degree(axis) > 1]
    per_token = f" ({_count(active)} active per token)" if flops.has_experts else ""
    ranks = f"{degrees.world_size} ranks" if degrees.world_size > 1 else "1 rank"
    pieces = f"{plan.num_microbatches} micro-batch{'es' if plan.num_microbatches > 1 else ''}"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row(
        "plan",
        f"{name}, {_count(size)} parameters{per_token}, on {ranks}"
        f"{': ' if axes else ''}{' '.join(axes)}, {plan.kind.name} with {pieces}",
    )
    table.add_row("work", _work(config, flops))
    for line in _support(config, plan):
        table.add_row("support", line)
    return table


def _work(config: RunConfig, flops: ModelFlops) -> str:
    rows, seq_len = config.batch.global_batch, config.batch.seq_len
    tokens = rows * seq_len
    total = flops.of(num_tokens=tokens, num_pairs=tokens * (seq_len + 1) // 2)
    # How long documents are is known when they are read.
    most = "at most " if config.data.packing == "isolated" else ""
    by_token = describe_flops(total // tokens)
    return f"{most}{describe_flops(total)} a global batch, {by_token} a token"


def _support(config: RunConfig, plan: Plan) -> Iterator[Text]:
    # The plan is resolved: what was repaired is seen in the plan as it was asked for.
    asked = replace(
        plan,
        stages_per_rank=config.pipeline.stages_per_rank,
        reshard_after_forward=config.fsdp.reshard,
    )
    found = rules(asked)
    if not found:
        told = ", but for what the notice says" if any(notices(config)) else ""
        yield Text(f"the plan runs as asked{told}")
    for rule in found:
        yield Text.assemble((rule.decision.value, "yellow"), f": {rule.reason} {rule.fix}")


def _heading(title: str) -> RenderableType:
    return Padding(Text(title, "bold"), (1, 0, 0, 0))


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for title in columns:
        justify: JustifyMethod = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, overflow="fold")
    return table


def _state(costs: Sequence[RankCost]) -> RenderableType:
    numbers = ("parameters", "weights", "gradients", "optimizer", "together")
    table = _table("pp", "layers", *numbers, numbers=numbers)
    for cost in costs:
        held = (cost.weight_bytes, cost.shard_bytes, cost.optimizer_bytes)
        table.add_row(
            str(cost.pp_rank),
            ", ".join(_span(layers) for layers in cost.layers),
            _count(cost.num_parameters),
            *map(_bytes, (*held, cost.state_bytes)),
        )
    return Group(table, _notes(("parameters", "of its stages, whole")))


def _passing(costs: Sequence[RankCost]) -> RenderableType:
    numbers = ("gathered", "gradients", "activations", "with shards")
    table = _table("pp", *numbers, numbers=numbers)
    for cost in costs:
        held = (cost.gathered_bytes, cost.gradient_bytes, cost.activation_bytes)
        table.add_row(str(cost.pp_rank), *map(_bytes, (*held, sum(held) + cost.state_bytes)))
    return Group(
        table,
        _notes(
            ("gathered", "whole weights: freed after the last backward pass"),
            ("gradients", "whole gradients: they wait for the last micro-batch"),
            ("activations", "of all micro-batches that wait for their backward pass; about"),
        ),
    )


def _by_axis(costs: Sequence[RankCost]) -> RenderableType:
    sums: dict[str, list[int]] = {}
    for number, cost in enumerate(costs):
        for item in cost.traffic:
            sums.setdefault(item.axis, [0] * len(costs))[number] += item.num_bytes
    table = _table("over", "pp", "sent", numbers=("sent",))
    for axis, sent in sums.items():
        table.add_row(
            axis, ranges(n for n, size in enumerate(sent) if size == max(sent)), _bytes(max(sent))
        )
    return table


def _traffic(costs: Sequence[RankCost]) -> RenderableType:
    table = _table("pp", "what", "collective", "over", "calls", "sent", numbers=("calls", "sent"))
    for cells, group in groupby(costs, key=_traffic_cells):
        span = ranges(cost.pp_rank for cost in group)
        for number, row in enumerate(cells):
            is_last = number == len(cells) - 1
            table.add_row("" if number else span, *row, end_section=is_last)
    notes = [("sent", "leaves the rank; an all-reduce counts as reduce-scatter and all-gather")]
    if any(item.at_most for cost in costs for item in cost.traffic):
        notes.append(("<=", "the schedule or the router decides; fewer where less is needed"))
    return Group(table, _notes(*notes))


def _traffic_cells(cost: RankCost) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for item in cost.traffic:
        most = "<= " if item.at_most else ""
        numbers = (f"{most}{item.calls}", f"{most}{_bytes(item.num_bytes)}")
        cells.append((item.what, item.collective, item.axis, *numbers))
    return cells or [("nothing", "-", "-", "0", "0 B")]


def _reductions(
    declared: Sequence[ParameterDeclaration], *, verbose: bool
) -> Iterator[RenderableType]:
    for fate, rows in rows_of(declared, verbose=verbose).items():
        table = _table("parameter", "shape", "stage", "unit")
        for row in rows:
            table.add_row(*(Text(cell) for cell in (row.name, row.shape, row.stages, row.unit)))
        yield _notes(("placement", fate.placement), ("gradient", fate.summed))
        yield table


def _notes(*notes: tuple[str, str]) -> RenderableType:
    """Explain words, below the first column of a table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="italic", no_wrap=True)
    table.add_column()
    for word, meaning in notes:
        table.add_row(word, Text(meaning))
    return Padding(table, (0, 0, 0, 1))


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
