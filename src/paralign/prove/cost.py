"""What a plan costs each pipeline rank in memory and communication; counted, not measured.

``tests/prove/test_cost.py`` counts the collectives of real runs and finds the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.declaration import ParameterDeclaration
from paralign.mesh import Axis, Degrees
from paralign.parallel.context_cores import CoreWatch
from paralign.parallel.data import ROOT_UNIT
from paralign.parallel.precision import apply_precision
from paralign.parallel.stage import boundary_tensors, meta_copy
from paralign.parallel.stages import split_layers
from paralign.parallel.support import Plan
from paralign.prove.cost_activations import stage_activations, waiting
from paralign.prove.cost_context import context_traffic
from paralign.prove.cost_experts import ExpertWatch, expert_traffic
from paralign.prove.cost_tensor import StreamWatch, tensor_traffic
from paralign.prove.traffic import BYTES, Traffic, all_reduced, sent
from paralign.train.build import build_precision, build_tensor

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}  # tensors like the parameter; sgd: 1 with momentum
# torch's runtime keeps this many stages of a rank gathered, and frees others between micro-batches.
GATHERED_STAGES = 3


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What one pipeline rank holds and sends; equal on all ranks of the other axes.

    Attributes:
        pp_rank: The pipeline rank.
        layers: Layer indices of each of its stages.
        num_parameters: Elements of its stages, unsharded.
        weight_bytes: Shards of weights.
        shard_bytes: Shards of gradients.
        optimizer_bytes: Shards of optimizer state.
        gathered_bytes: Unsharded weights in the backward pass: those of all its stages, whatever is
            freed after the forward pass, because a pipeline frees them with the last micro-batch.
            Less where a schedule ends one stage before it begins the next.
        gradient_bytes: Unsharded gradients that wait for the last micro-batch, likewise.
        activation_bytes: What the backward pass keeps of the forward pass, at most: of all
            micro-batches that wait at one time, and what is computed again of one of them.
        traffic: Its collectives. Groups of one rank move nothing and are left out.
    """

    pp_rank: int
    layers: list[range]
    num_parameters: int
    weight_bytes: int
    shard_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    activation_bytes: int
    traffic: list[Traffic]

    @property
    def state_bytes(self) -> int:
        """Shards of weights, gradients and optimizer state together."""
        return self.weight_bytes + self.shard_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class _Unit:
    pp_rank: int
    stage: int
    name: str
    numel: int  # of all parameters
    padded: int  # the same, each rounded up to whole shards
    trainable: int  # padded, of those that get a gradient
    num_shards: int
    axis: str  # what it is sharded over


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
    activations = stage_activations(
        model, blueprint, config=config, plan=plan, splits=shapes.splits
    )
    costs = []
    for pp_rank in range(plan.pp):
        mine = [unit for unit in units if unit.pp_rank == pp_rank]
        stages = sorted({unit.stage for unit in mine})
        alive = waiting(plan, pp_rank, stages)
        traffic = [
            *_data_traffic(mine, plan, degrees),
            *_pipeline_traffic(stages, shapes, plan),
            *_tied_traffic(pp_rank, declared, degrees),
            *context_traffic(
                shapes.cores,
                config=config,
                plan=plan,
                num_layers=sum(len(shapes.splits[stage]) for stage in stages),
                stream_parts=shapes.stream_parts,
            ),
            *tensor_traffic(
                [piece for stage in stages for piece in shapes.pieces[stage]],
                shapes.stream,
                config=config,
                plan=plan,
                head=blueprint.head_name if plan.loss_chunks > 1 else None,
                has_loss=plan.num_stages - 1 in stages,
            ),
            *_partial_traffic(pp_rank, declared, degrees),
            *expert_traffic(
                [piece for stage in stages for piece in shapes.pieces[stage]],
                shapes.experts,
                config=config,
                plan=plan,
            ),
            # Six numbers with the loss, one for the norm, float64.
            Traffic(
                what="loss, norm",
                collective="all-reduce",
                axis="world",
                calls=2,
                num_bytes=all_reduced(7 * 8, degrees.world_size),
            ),
        ]
        costs.append(
            RankCost(
                pp_rank=pp_rank,
                layers=[shapes.splits[stage] for stage in stages],
                num_parameters=sum(unit.numel for unit in mine),
                **_state_bytes(mine, config),
                gathered_bytes=sum(u.padded for u in mine) * BYTES[plan.compute_dtype],
                gradient_bytes=sum(u.trainable for u in mine) * BYTES[plan.reduce_dtype],
                activation_bytes=sum(alive[s] * activations[s][0] for s in stages)
                + max(activations[s][1] for s in stages),
                traffic=[item for item in traffic if item.num_bytes],
            )
        )
    return costs


def _units(declared: Sequence[ParameterDeclaration], degrees: Degrees) -> list[_Unit]:
    def key(p: ParameterDeclaration) -> tuple[int, int, str]:
        return p.pp_rank, p.stage, p.unit

    dense = " x ".join(str(a) for a in (Axis.DP_SHARD, Axis.CP) if degrees.degree(a) > 1)
    units = []
    for (pp_rank, stage, name), group in groupby(sorted(declared, key=key), key=key):
        members = list(group)
        is_expert = any(str(a) in members[0].placements for a in (Axis.EFSDP, Axis.EP))
        num_shards = degrees.efsdp if is_expert else degrees.fsdp
        padded = {p.name: _padded(_left(p, degrees), num_shards) for p in members}
        units.append(
            _Unit(
                pp_rank=pp_rank,
                stage=stage,
                name=name,
                numel=sum(math.prod(p.shape) for p in members),
                padded=sum(padded.values()),
                trainable=sum(padded[p.name] for p in members if p.trainable),
                num_shards=num_shards,
                axis=str(Axis.EFSDP) if is_expert else dense,
            )
        )
    return units


def _left(p: ParameterDeclaration, degrees: Degrees) -> tuple[int, ...]:
    """Return the shape that tp and ep leave for FSDP to shard."""
    shape = list(p.shape)
    for axis in (Axis.TP, Axis.EP):
        for dim in range(len(shape)):
            if p.placements.get(str(axis)) == f"shard({dim})":
                shape[dim] //= degrees.degree(axis)
    return tuple(shape)


def _padded(shape: tuple[int, ...], num_shards: int) -> int:
    """Shards are cut along dim 0, and all are as large as the largest."""
    rows = shape[0] if shape else 1
    return -(-rows // num_shards) * num_shards * math.prod(shape[1:])


def _state_bytes(units: Sequence[_Unit], config: RunConfig) -> dict[str, int]:
    states = OPTIMIZER_STATES[config.optimizer.name]
    states += config.optimizer.name == "sgd" and config.optimizer.momentum > 0
    size = BYTES["float32"]
    trained = sum(unit.trainable // unit.num_shards for unit in units)
    return {
        "weight_bytes": size * sum(unit.padded // unit.num_shards for unit in units),
        "shard_bytes": size * trained,
        "optimizer_bytes": size * states * trained,
    }


def _data_traffic(units: Sequence[_Unit], plan: Plan, degrees: Degrees) -> Iterator[Traffic]:
    # A stage that is evicted meanwhile is gathered again: at most once a pass and micro-batch.
    is_evicted = plan.num_stages_per_rank > GATHERED_STAGES
    for axis, freed in itertools.product(dict.fromkeys(u.axis for u in units), (False, True)):
        chosen = [u for u in units if u.axis == axis and _is_freed(u, plan) is freed]
        # A forward pass frees, a backward pass keeps: whatever their order, what is freed is
        # gathered once more than there are micro-batches.
        times = plan.num_microbatches + 1 if freed else 1
        if is_evicted:
            times = 2 * plan.num_microbatches
        gathered = sum(sent(u.padded, u.num_shards) for u in chosen) * BYTES[plan.compute_dtype]
        yield Traffic(
            what="weights, freed" if freed else "weights, kept",
            collective="all-gather",
            axis=axis,
            calls=times * len(chosen),
            num_bytes=times * gathered,
            at_most=is_evicted,
        )
    trained = [u for u in units if u.trainable]
    size = BYTES[plan.reduce_dtype]
    for axis in dict.fromkeys(u.axis for u in units):
        chosen = [u for u in trained if u.axis == axis]
        yield Traffic(
            what="gradients",
            collective="reduce-scatter",
            axis=axis,
            calls=len(chosen),
            num_bytes=sum(sent(u.trainable, u.num_shards) for u in chosen) * size,
        )
    shards = sum(u.trainable // u.num_shards for u in trained)
    yield Traffic(
        what="gradients",
        collective="all-reduce",
        axis=str(Axis.DP_REPLICATE),
        calls=len(trained),
        num_bytes=all_reduced(shards * size, degrees.dp_replicate),
    )


def _is_freed(unit: _Unit, plan: Plan) -> bool:
    if plan.reshard_after_forward is None:
        return unit.name != ROOT_UNIT
    return plan.reshard_after_forward


def _tied_traffic(
    pp_rank: int, declared: Sequence[ParameterDeclaration], degrees: Degrees
) -> Iterator[Traffic]:
    """Each of two ranks sends the other its shard of the gradient of a tied parameter."""
    rank_of = {p.name: p.pp_rank for p in declared}
    apart = [p for p in declared if p.tied_to and rank_of[p.tied_to] != p.pp_rank and p.trainable]
    here = [p for p in apart if pp_rank in (p.pp_rank, rank_of[str(p.tied_to)])]
    shapes = [_left(p, degrees) for p in here]
    shards = [_padded(shape, degrees.fsdp) // degrees.fsdp for shape in shapes]
    yield Traffic(
        what="tied gradient",
        collective="send",
        axis=str(Axis.PP),
        calls=len(here),
        num_bytes=sum(shards) * BYTES["float32"],
        at_most=any(s[0] % degrees.fsdp for s in shapes),  # then the last shard is smaller
    )


def _partial_traffic(
    pp_rank: int, declared: Sequence[ParameterDeclaration], degrees: Degrees
) -> Iterator[Traffic]:
    """Gradients that are partial sums over tp are summed together, each rank its shards."""
    here = [p for p in declared if p.pp_rank == pp_rank and str(Axis.TP) in p.partial_over]
    here = [p for p in here if p.trainable]
    shards = [_padded(p.shape, degrees.fsdp) // degrees.fsdp for p in here]
    yield Traffic(
        what="gradients",
        collective="all-reduce",
        axis=str(Axis.TP),
        calls=1,
        num_bytes=all_reduced(sum(shards) * BYTES["float32"], degrees.tp),
        at_most=any(p.shape[0] % degrees.fsdp for p in here),
    )


class _Shapes:
    """Shapes of one micro-batch, found on the meta device."""

    def __init__(
        self, model: nn.Module, blueprint: Blueprint, config: RunConfig, plan: Plan
    ) -> None:
        assert plan.num_layers is not None
        degrees = config.mesh.degrees
        self.splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
        skeleton = meta_copy(model, getattr(torch, plan.compute_dtype))
        options = build_tensor(config)
        self.stream_parts = degrees.tp if options.sequence_parallel else 1
        style_plan = blueprint.tensor_parallel() if degrees.tp > 1 else {}
        self.stream = StreamWatch(skeleton, style_plan, options)
        precision = build_precision(config)
        # After the watch: what tp sends for the embedding is not in the stream's dtype yet.
        apply_precision(skeleton, blueprint, precision)
        layers = [[f"{blueprint.layers_name}.{i}" for i in split] for split in self.splits]
        layers[0] += blueprint.prologue_names
        layers[-1] += blueprint.epilogue_names
        self.pieces = layers  # of every stage
        self.experts = ExpertWatch(skeleton, blueprint, [n for names in layers for n in names])
        first = skeleton.get_submodule(f"{blueprint.layers_name}.0")
        self.cores = CoreWatch([first], blueprint)
        self.boundaries = boundary_tensors(
            skeleton,
            blueprint,
            splits=self.splits,
            rows=config.batch.global_batch // degrees.dp // plan.num_microbatches,
            local_seq=config.batch.seq_len // degrees.cp,
            stream_parts=self.stream_parts,
            chunks_loss=plan.loss_chunks > 1,
            stream_dtype=precision.residual,
        )


def _pipeline_traffic(stages: Sequence[int], shapes: _Shapes, plan: Plan) -> Iterator[Traffic]:
    here = set(stages)
    outward = [s for s in stages if s + 1 < plan.num_stages and s + 1 not in here]
    inward = [s for s in stages if s > 0 and s - 1 not in here]
    total = sum(shapes.boundaries[s][1].nbytes for s in outward)
    total += sum(shapes.boundaries[s][0].nbytes for s in inward)
    m = plan.num_microbatches
    yield Traffic(
        what="activations",  # and their gradients
        collective="send",
        axis=str(Axis.PP),
        calls=m * (len(outward) + len(inward)),
        num_bytes=m * total,
    )
