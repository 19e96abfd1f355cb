"""What a plan costs each pipeline rank in memory and communication; counted, not measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.declaration import ParameterDeclaration
from paralign.mesh import Degrees
from paralign.parallel.context_rules import inner_degree
from paralign.parallel.data import ROOT_UNIT
from paralign.parallel.stage import boundary_tensors, meta_copy
from paralign.parallel.stages import split_layers
from paralign.parallel.support import Plan

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}  # tensors like the parameter; sgd: 1 with momentum


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Calls of one collective that a rank makes in one step.

    Attributes:
        what: What it moves.
        collective: Its name.
        axis: The axis it runs over.
        calls: Number of calls, or the largest number where the schedule decides.
        num_bytes: Bytes of this rank's tensors in all calls together.
        at_most: Whether the schedule may need fewer.
    """

    what: str
    collective: str
    axis: str
    calls: int
    num_bytes: int
    at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What one pipeline rank holds and sends; equal on all ranks of the other axes.

    Attributes:
        pp_rank: The pipeline rank.
        layers: Layer indices of each of its stages.
        num_parameters: Elements of its stages, unsharded.
        state_bytes: Shards of weights, gradients and optimizer state.
        gathered_bytes: The most unsharded weights at one time.
        gradient_bytes: Unsharded gradients that wait for the last micro-batch.
        traffic: Its collectives.
    """

    pp_rank: int
    layers: list[range]
    num_parameters: int
    state_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    traffic: list[Traffic]


@dataclass(frozen=True, kw_only=True)
class _Unit:
    pp_rank: int
    stage: int
    name: str
    numel: int  # of all parameters
    padded: int  # the same, each rounded up to whole shards
    trainable: int  # padded, of those that get a gradient


def estimate(
    model: nn.Module,
    blueprint: Blueprint,
    *,
    config: RunConfig,
    plan: Plan,
    declared: Sequence[ParameterDeclaration],
) -> list[RankCost]:
    """Return the cost of every pipeline rank.

    Args:
        model: The whole model on the meta device.
        blueprint: How it is cut.
        config: The run.
        plan: The resolved plan.
        declared: What :func:`paralign.declaration.declare` returned.
    """
    degrees = config.mesh.degrees
    units = _units(declared, degrees)
    shapes = _Shapes(model, blueprint, config, plan)
    costs = []
    for pp_rank in range(plan.pp):
        mine = [unit for unit in units if unit.pp_rank == pp_rank]
        stages = sorted({unit.stage for unit in mine})
        costs.append(
            RankCost(
                pp_rank=pp_rank,
                layers=[shapes.splits[stage] for stage in stages],
                num_parameters=sum(unit.numel for unit in mine),
                state_bytes=_state_bytes(mine, config, degrees),
                gathered_bytes=_gathered_bytes(mine, plan),
                gradient_bytes=sum(u.trainable for u in mine) * BYTES[plan.reduce_dtype],
                traffic=[
                    *_data_traffic(mine, plan, degrees),
                    *_pipeline_traffic(stages, shapes, plan),
                    *_context_traffic(stages, shapes, config, plan),
                    Traffic(
                        what="loss and gradient norm",
                        collective="all-reduce",
                        axis="world",
                        calls=2,
                        num_bytes=40,
                    ),
                ],
            )
        )
    return costs


def _units(declared: Sequence[ParameterDeclaration], degrees: Degrees) -> list[_Unit]:
    def key(p: ParameterDeclaration) -> tuple[int, int, str]:
        return p.pp_rank, p.stage, p.unit

    units = []
    for (pp_rank, stage, name), group in groupby(sorted(declared, key=key), key=key):
        members = list(group)
        padded = {p.name: _padded(p.shape, degrees.fsdp) for p in members}
        units.append(
            _Unit(
                pp_rank=pp_rank,
                stage=stage,
                name=name,
                numel=sum(math.prod(p.shape) for p in members),
                padded=sum(padded.values()),
                trainable=sum(padded[p.name] for p in members if p.trainable),
            )
        )
    return units


def _padded(shape: tuple[int, ...], num_shards: int) -> int:
    """Shards are cut along dim 0, and all are as large as the largest."""
    rows = shape[0] if shape else 1
    return -(-rows // num_shards) * num_shards * math.prod(shape[1:])


def _state_bytes(units: Sequence[_Unit], config: RunConfig, degrees: Degrees) -> int:
    states = OPTIMIZER_STATES[config.optimizer.name]
    states += config.optimizer.name == "sgd" and config.optimizer.momentum > 0
    weights = sum(unit.padded for unit in units)
    trained = sum(unit.trainable for unit in units)
    return (weights + (1 + states) * trained) // degrees.fsdp * BYTES["float32"]


def _gathered_bytes(units: Sequence[_Unit], plan: Plan) -> int:
    roots = sum(unit.padded for unit in units if unit.name == ROOT_UNIT)
    others = sorted((unit.padded for unit in units if unit.name != ROOT_UNIT), reverse=True)
    # The next unit is gathered while one computes.
    held = others if plan.reshard_after_forward is False else others[:2]
    return (roots + sum(held)) * BYTES[plan.compute_dtype]


def _data_traffic(units: Sequence[_Unit], plan: Plan, degrees: Degrees) -> Iterator[Traffic]:
    m = plan.num_microbatches
    for freed in (False, True):
        chosen = [u for u in units if _is_freed(u, plan) is freed]
        if chosen:
            times = 2 * m if freed else 1
            yield Traffic(
                what="weights freed after forward" if freed else "weights",
                collective="all-gather",
                axis="dp_shard x cp",
                calls=times * len(chosen),
                num_bytes=times * sum(u.padded for u in chosen) * BYTES[plan.compute_dtype],
                at_most=freed,
            )
    trained = [u for u in units if u.trainable]
    total = sum(u.trainable for u in trained) * BYTES[plan.reduce_dtype]
    yield Traffic(
        what="gradients",
        collective="reduce-scatter",
        axis="dp_shard x cp",
        calls=len(trained),
        num_bytes=total,
    )
    if degrees.dp_replicate > 1:
        yield Traffic(
            what="gradients",
            collective="all-reduce",
            axis="dp_replicate",
            calls=len(trained),
            num_bytes=total // degrees.fsdp,
        )


def _is_freed(unit: _Unit, plan: Plan) -> bool:
    if plan.reshard_after_forward is None:
        return unit.name != ROOT_UNIT
    return plan.reshard_after_forward


class _Shapes:
    """Shapes of one micro-batch, found on the meta device."""

    def __init__(
        self, model: nn.Module, blueprint: Blueprint, config: RunConfig, plan: Plan
    ) -> None:
        assert plan.num_layers is not None
        degrees = config.mesh.degrees
        self.splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
        self.core_inputs: list[tuple[Tensor, ...]] = []
        skeleton = meta_copy(model, getattr(torch, plan.compute_dtype))
        first = skeleton.get_submodule(f"{blueprint.layers_name}.0")
        for name in blueprint.attention():
            first.get_submodule(name).register_forward_pre_hook(self._watch)
        self.boundaries = boundary_tensors(
            skeleton,
            blueprint,
            splits=self.splits,
            rows=config.batch.global_batch // degrees.dp // plan.num_microbatches,
            local_seq=config.batch.seq_len // degrees.cp,
        )

    def _watch(self, core: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.core_inputs.append(args)


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _pipeline_traffic(stages: Sequence[int], shapes: _Shapes, plan: Plan) -> Iterator[Traffic]:
    if plan.pp == 1:
        return
    here = set(stages)
    outward = [s for s in stages if s + 1 < plan.num_stages and s + 1 not in here]
    inward = [s for s in stages if s > 0 and s - 1 not in here]
    sent = sum(_num_bytes(shapes.boundaries[s][1]) for s in outward)
    sent += sum(_num_bytes(shapes.boundaries[s][0]) for s in inward)
    m = plan.num_microbatches
    yield Traffic(
        what="activations and their gradients",
        collective="send",
        axis="pp",
        calls=m * (len(outward) + len(inward)),
        num_bytes=m * sent,
    )


def _context_traffic(
    stages: Sequence[int], shapes: _Shapes, config: RunConfig, plan: Plan
) -> Iterator[Traffic]:
    cp = config.mesh.cp
    if cp == 1:
        return
    calls = plan.num_microbatches * sum(len(shapes.splits[stage]) for stage in stages)
    inner = inner_degree(cp, config.context.ulysses_degree)
    for q, k, v, *_ in shapes.core_inputs:
        if inner > 1:
            output = q.new_empty((*q.shape[:-1], v.shape[-1]))
            yield Traffic(
                what="q, k, v and attention output",
                collective="all-to-all",
                axis="cp",
                calls=4 * calls,
                num_bytes=2 * calls * _num_bytes(q, k, v, output),
            )
        if inner < cp:
            yield Traffic(
                what="keys and values",
                collective="all-gather",
                axis="cp",
                calls=calls,
                num_bytes=calls * _num_bytes(k, v) * (cp // inner),
            )
            yield Traffic(
                what="their gradients",
                collective="reduce-scatter",
                axis="cp",
                calls=calls,
                num_bytes=calls * _num_bytes(k, v) * (cp // inner),
            )
