"""Applies the mesh axes to a model in the one legal order, and owns every scale factor.

The order is: pipeline split -> tensor parallel -> loss in chunks -> context parallel -> expert
parallel -> compilation -> recomputation -> FSDP -> pipeline runtime. Later ones see the modules
that earlier ones left, and nothing else works: FSDP must shard the parameters of a finished stage
and what tensor and expert parallelism left of them, and what is recomputed must hold all that wraps
a module but FSDP, whose hooks count its calls.

There is one scale factor in the whole project: token losses are divided by the number of valid
tokens of the global batch before the backward pass. Everything after that is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.blueprint import Blueprint
from paralign.checksum import checksum
from paralign.dropout import named_dropouts
from paralign.errors import ConfigError
from paralign.layout import local_boxes
from paralign.mesh import Axis, Degrees, degrees_of, expert_mesh, fold
from paralign.models.compose import structure_problems
from paralign.models.router import named_biases, named_routers
from paralign.parallel.compiled import (
    Compile,
    apply_compile,
    check_compiler,
    modules_outside,
)
from paralign.parallel.data import FSDP, Precision, ReductionCounter, apply_fsdp, plan_units
from paralign.parallel.expert import ExpertParallel
from paralign.parallel.pipeline import Pipeline, PipelineRuntime
from paralign.parallel.precision import apply_precision
from paralign.parallel.recompute import Recompute, apply_recompute
from paralign.parallel.stage import Stage, meta_copy
from paralign.parallel.stages import rank_of_stage, split_layers, stages_of_rank
from paralign.parallel.support import Plan
from paralign.parallel.tensor import apply_tensor
from paralign.parallel.tensor_base import Returned, TensorParallel
from paralign.parallel.tensor_outputs import returned_of
from paralign.parallel.tied import TiedPair, find_tied, untie
from paralign.planning import all_experts, expert_stacks, settle_plan, stage_of_parameters
from paralign.program import Program
from paralign.randomness import Init, fill_

InitRule = Callable[[str, tuple[int, ...]], Init]


@dataclass(frozen=True, kw_only=True)
class Context:
    """How attention is spread over the cp axis.

    Attributes:
        ulysses_degree: None: the whole axis trades sequence for heads; 1: keys and values are
            gathered; in between: both.
        load_balance: Give each rank one early and one late chunk of the sequence; gather only.
    """

    ulysses_degree: int | None = None
    load_balance: bool = False


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    blueprint: Blueprint,
    pipeline: Pipeline | None = None,
    fsdp: FSDP | None = None,
    context: Context | None = None,
    tensor: TensorParallel | None = None,
    recompute: Recompute | None = None,
    precision: Precision | None = None,
    loss_chunks: int = 1,
    compiling: Compile | None = None,
    init: InitRule | None = None,
    seed: int = 0,
) -> Program:
    """Turn a plain model into this rank's part of a parallel training run.

    Collective: every rank of ``mesh`` calls it with an equal model.

    Args:
        model: The whole model; its modules are taken over. On the meta device it is initialised
            here, each rank its own shards only, from ``(seed, parameter name, element index)``.
            With real weights, the same on every rank, those are kept.
        mesh: What :func:`paralign.build_mesh` returned.
        blueprint: How the model is cut into pieces.
        pipeline: Schedule and micro-batches; default one stage a rank, 1F1B.
        fsdp: How parameters are grouped into units.
        context: How attention is spread over cp.
        tensor: How layers are spread over tp; default with sequence parallel.
        recompute: What is computed again in the backward pass instead of kept.
        precision: Dtypes of the step.
        loss_chunks: Compute logits and loss in so many chunks of the sequence, so that the logits
            of all tokens never exist. Needs ``blueprint.head_name``.
        compiling: Whether ``torch.compile`` compiles each layer.
        init: Name and global shape of a parameter -> how it starts, for a model on the meta device;
            default ``blueprint.init``.
        seed: Seed of the initial values, and of what :class:`paralign.Dropout` drops.

    Comm:
        With real weights one all-gather of a hash per parameter, to prove them equal.

    Raises:
        ConfigError: The plan is refused or does not fit the model; all problems are listed.
    """
    degrees = degrees_of(mesh)
    if found := structure_problems(model, blueprint):
        title = f"{type(blueprint).__name__} does not describe {type(model).__name__}"
        raise ConfigError.from_problems(title, found)
    pipeline = pipeline or Pipeline()
    fsdp = fsdp or FSDP()
    precision = precision or Precision()
    context = context or Context()
    tensor = tensor or TensorParallel()
    recompute = recompute or Recompute()
    compiling = compiling or Compile()
    check_compiler(compiling, mesh.device_type)
    plan = settle_plan(
        model,
        degrees,
        blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        precision=precision,
        tensor=tensor,
        recompute=recompute,
        loss_chunks=loss_chunks,
        compiling=compiling,
    )

    tensors = [*model.parameters(), *model.buffers()]
    is_meta = any(tensor.is_meta for tensor in tensors)
    device = _device(mesh)
    initialised = named_biases([model])
    has_router_biases = bool(initialised)  # of any stage
    if is_meta and any(name not in initialised for name, _ in model.named_buffers()):
        raise ConfigError(
            "the model is on the meta device and has buffers, whose values would be lost. Build "
            "it on a real device, or compute them in the blueprint's context."
        )
    if not is_meta:
        _check_same_weights(model, degrees)

    has_dropout = bool(named_dropouts([model]))  # of any stage
    skeleton = meta_copy(model, precision.compute)
    apply_precision(skeleton, blueprint, precision)
    stages, pairs = _split(model, mesh, blueprint, plan)
    untie(stages, pairs)
    counter = ReductionCounter()
    partial_over_tp: set[str] = set()
    returned: dict[str, Returned] = {}
    for index, stage in stages.items():
        stacks = expert_stacks(stage, blueprint, stage.layer_names)
        if not is_meta:
            stage.to(device)
        apply_precision(stage, blueprint, precision)
        if degrees.tp > 1:
            partial_over_tp |= apply_tensor(
                stage,
                mesh[str(Axis.TP)],
                plan=blueprint.tensor_parallel(),
                options=tensor,
                experts=list(stacks),
            )
            returned |= _returned(stage, blueprint, degree=degrees.tp, options=tensor)
        if loss_chunks > 1:
            stage.chunk_loss(loss_chunks)
        _apply_context(stage, mesh, blueprint, context)
        _share_dropouts(stage, mesh)
        _balance_whole_sequences(stage, mesh)
        experts = _apply_experts(stage, mesh, stacks) if degrees.spreads_experts else []
        for name in stage.layer_names:
            layer = stage.get_submodule(name)
            outside = modules_outside(name, blueprint.attention(), stacks)
            apply_compile(layer, compiling, outside=outside)
            apply_recompute(layer, recompute)
        names = [name for name, _ in stage.named_modules() if name]
        apply_fsdp(
            stage,
            mesh,
            units=plan_units(fsdp.wrap, stage.layer_names, names),
            experts=experts,
            reshard_after_forward=plan.reshard_after_forward,
            precision=precision,
            counter=counter,
            label=f"stage {index}: ",
        )
        if is_meta:
            aliases = {pair.alias: pair.canonical for pair in pairs}
            stage.to_empty(device=device)
            _initialise(stage, init or blueprint.init, seed=seed, aliases=aliases)

    stream_parts = degrees.tp if tensor.sequence_parallel else 1
    # Experts see each token on one rank of tp, in any case.
    token_parts = degrees.tp if all_experts(skeleton, blueprint) else stream_parts
    runtime = PipelineRuntime(
        stages,
        plan=plan,
        blueprint=blueprint,
        skeleton=skeleton,
        mesh=mesh,
        device=device,
        stream_parts=stream_parts,
        stream_dtype=precision.residual,
    )
    return Program(
        stages=stages,
        runtime=runtime,
        mesh=mesh,
        plan=plan,
        pairs=pairs,
        counter=counter,
        unused=blueprint.unused_parameters,
        load_balance=context.load_balance,
        device=device,
        token_parts=token_parts,
        takes_documents=blueprint.takes_documents,
        partial_over_tp=partial_over_tp,
        has_router_biases=has_router_biases,
        returned=returned,
        dropout_seed=seed if has_dropout else None,
    )


def _returned(
    stage: Stage, blueprint: Blueprint, *, degree: int, options: TensorParallel
) -> dict[str, Returned]:
    """Say which parts of module outputs a rank of tp has."""
    heads = {
        f"{layer}.{core}": style.head_dim
        for layer in stage.layer_names
        for core, style in blueprint.attention().items()
    }
    plan = blueprint.tensor_parallel()
    experts = list(expert_stacks(stage, blueprint, stage.layer_names))
    return returned_of(
        stage, plan, degree=degree, options=options, head_dims=heads, experts=experts
    )


def _split(
    model: nn.Module, mesh: DeviceMesh, blueprint: Blueprint, plan: Plan
) -> tuple[dict[int, Stage], list[TiedPair]]:
    """Cut this rank's stages out of the model, and find tied parameters that the cut separates."""
    assert plan.num_layers is not None
    owners = stage_of_parameters(model, blueprint, plan)
    aliases = find_tied(model)
    pairs = []
    for alias, canonical in aliases.items():
        both = (owners[canonical], owners[alias])
        if both[0] != both[1]:
            ranks = (
                rank_of_stage(plan.kind, plan.pp, both[0]),
                rank_of_stage(plan.kind, plan.pp, both[1]),
            )
            pairs.append(TiedPair(canonical=canonical, alias=alias, stages=both, ranks=ranks))
    splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
    pp_rank = mesh[str(Axis.PP)].get_local_rank()
    stages = {
        index: Stage(
            model,
            blueprint,
            layers=splits[index],
            is_first=index == 0,
            is_last=index == plan.num_stages - 1,
        )
        for index in stages_of_rank(plan.kind, plan.pp, pp_rank, plan.num_stages_per_rank)
    }
    return stages, pairs


def _apply_context(stage: Stage, mesh: DeviceMesh, blueprint: Blueprint, context: Context) -> None:
    cores = blueprint.attention()
    cp_mesh = mesh[str(Axis.CP)]
    if not cores and cp_mesh.size() > 1:
        raise ConfigError(
            f"the blueprint names no attention core, and axis 'cp' has {cp_mesh.size()} ranks. "
            "Return it from Blueprint.attention(), or use cp=1."
        )
    for layer_name in stage.layer_names:
        for core_name, style in cores.items():
            core = stage.get_submodule(f"{layer_name}.{core_name}")
            style.configured(
                ulysses_degree=context.ulysses_degree,
                load_balance=context.load_balance,
                positions_proven=True,  # by sequence_positions, each time a batch is cut
            ).apply(core, cp_mesh)


def _apply_experts(
    stage: Stage, mesh: DeviceMesh, stacks: Mapping[str, ExpertParallel]
) -> list[str]:
    for name, style in stacks.items():
        style.apply(stage.get_submodule(name), expert_mesh(mesh)[str(Axis.EP)])
    return list(stacks)


def _balance_whole_sequences(stage: Stage, mesh: DeviceMesh) -> None:
    """Let routers see how often experts were selected in whole sequences, not in a slice."""
    group = fold(mesh, Axis.SEQUENCE).get_group()

    def sum_over_sequence(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    for router in named_routers([stage]).values():
        router.sum_over_sequence = sum_over_sequence


def _share_dropouts(stage: Stage, mesh: DeviceMesh) -> None:
    """Let dropouts know which part of the stream, or of features, a rank of tp has."""
    tp_mesh = mesh[str(Axis.TP)]
    for module in named_dropouts([stage]).values():
        module.spread(tp_mesh.get_local_rank(), tp_mesh.size())


def _initialise(stage: Stage, init: InitRule, *, seed: int, aliases: dict[str, str]) -> None:
    """Fill each local shard with its part of the global initial values."""
    for name, parameter in stage.named_parameters():
        canonical = aliases.get(name, name)
        global_shape = tuple(parameter.shape)
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]  # FSDP made a DTensor
        fill_(
            local,
            init(canonical, global_shape),
            seed=seed,
            name=canonical,
            global_shape=global_shape,
            offsets=_offsets(parameter, tuple(local.shape)),
        )
    for name, bias in named_biases([stage]).items():
        shape = tuple(bias.shape)
        rule = init(name, shape)
        fill_(bias, rule, seed=seed, name=name, global_shape=shape, offsets=(0,) * len(shape))


def _offsets(parameter: nn.Parameter, held_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the local shard of a sharded parameter starts in the global one."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    held = local_boxes(
        parameter.shape,
        placements,
        mesh.shape,
        mesh.get_coordinate(),
        held_shape=held_shape,
    )
    # FSDP cuts one dim into contiguous pieces, so there is at most one span a dim.
    return tuple(spans[0].global_[0] if spans else 0 for spans in held)


def _check_same_weights(model: nn.Module, degrees: Degrees) -> None:
    """Raise unless every rank passed the same initial weights."""
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    sums = torch.stack([checksum(tensor) for _, tensor in named]).cpu()
    everyone: list[Tensor] = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sums)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, everyone[0]):
            first = int((theirs != everyone[0]).nonzero()[0])
            raise ConfigError(
                f"the initial weights differ between ranks: {named[first][0]} on "
                f"{degrees.describe_rank(rank)} is not what it is on {degrees.describe_rank(0)}. "
                "Build the model from one seed on every rank, or on the meta device."
            )


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )
