"""Turns a config into the objects of a run, the same ones for the reference and for every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.blueprint import Blueprint
from paralign.config.model_choice import build_model
from paralign.config.run import RunConfig
from paralign.data.source import TokenSource
from paralign.errors import ConfigError
from paralign.mesh import build_mesh
from paralign.models.router import named_biases
from paralign.parallel.compiled import Compile
from paralign.parallel.data import FSDP, PARTS, Precision
from paralign.parallel.pipeline import Pipeline
from paralign.parallel.recompute import Recompute
from paralign.parallel.tensor_base import TensorParallel
from paralign.parallelize import Context, InitRule, parallelize
from paralign.program import Program
from paralign.randomness import Init, fill_
from paralign.train.data import open_source
from paralign.train.freeze import freeze
from paralign.train.start import start_program


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The dtypes of one run that ``align`` makes.

    Attributes:
        name: What the run is called: ``float64``, ``float32`` or ``bfloat16``.
        master: Dtype of parameters, optimizer state and recorded gradients.
        compute: Dtype of forward and backward.
        reduce: Dtype in which gradients are accumulated over micro-batches and reduced over ranks.
        softmax: Dtype of attention, where it is wider than ``compute``.
        logits: Dtype of the head, likewise.
        residual: Dtype of the residual stream, likewise.
    """

    name: str
    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    softmax: torch.dtype | None = None
    logits: torch.dtype | None = None
    residual: torch.dtype | None = None

    @property
    def precision(self) -> Precision:
        """The same, as ``parallelize`` takes it: None where nothing is cast."""
        if self.compute == self.master == self.reduce:
            return Precision()
        return Precision(
            compute=self.compute,
            reduce=self.reduce,
            softmax=self.softmax,
            logits=self.logits,
            residual=self.residual,
        )


def numerics(name: str, config: RunConfig) -> Numerics:
    """Return the dtypes of a run in ``name``; bfloat16 keeps float32 weights.

    Parts that stay in float32 do so below it only: in float32 and float64 all parts are alike.
    """
    if name != "bfloat16":
        dtype = getattr(torch, name)
        return Numerics(name=name, master=dtype, compute=dtype, reduce=dtype)
    is_low = config.precision.reduce == "bfloat16"
    reduce = torch.bfloat16 if is_low else torch.float32
    return Numerics(
        name=name, master=torch.float32, compute=torch.bfloat16, reduce=reduce, **_parts(config)
    )


def training_numerics(config: RunConfig) -> Numerics:
    """Return the dtypes that ``paralign train`` trains in: weights in float32 at least."""
    section = config.precision
    compute, reduce = getattr(torch, section.compute), getattr(torch, section.reduce)
    master = torch.float64 if compute == torch.float64 else torch.float32
    return Numerics(
        name=section.compute, master=master, compute=compute, reduce=reduce, **_parts(config)
    )


def build_precision(config: RunConfig) -> Precision:
    """Return the dtypes of the training step that ``config`` describes."""
    section = config.precision
    return Precision(
        compute=getattr(torch, section.compute),
        reduce=getattr(torch, section.reduce),
        **_parts(config),
    )


def _parts(config: RunConfig) -> dict[str, torch.dtype | None]:
    chosen = {part: getattr(config.precision, part) for part in PARTS}
    return {part: torch.float32 if dtype == "float32" else None for part, dtype in chosen.items()}


def build_pieces(config: RunConfig, dtype: torch.dtype) -> tuple[nn.Module, Blueprint]:
    """Build the model and its blueprint.

    A model of paralign's is built on the meta device: its weights come from :func:`init_rule`. A
    user's own is built for real, from the config's seed, because its buffers would be lost
    otherwise.
    """
    if config.model.name is None:
        torch.manual_seed(config.align.seed)
        model, blueprint = build_model(config.model)
    else:
        with torch.device("meta"):
            model, blueprint = build_model(config.model)
    check_documents(config, blueprint)
    freeze(model, config.optimizer.freeze)
    return model.to(dtype), blueprint


def check_documents(config: RunConfig, blueprint: Blueprint) -> None:
    """Check that the model can keep attention inside of documents, if it is asked to.

    Raises:
        ConfigError: It cannot.
    """
    if config.data.packing == "isolated" and not blueprint.takes_documents:
        raise ConfigError(
            f"data.packing=isolated needs a model that keeps attention inside of documents, and "
            f"{type(blueprint).__name__} does not say that it does. Build the mask and positions "
            "from the batch's documents in context and forward and set takes_documents, or use "
            "packing: packed."
        )


def init_rule(config: RunConfig, blueprint: Blueprint) -> InitRule:
    """Return the blueprint's initial values, with noise on whatever would start constant."""
    jitter = config.align.jitter

    def rule(name: str, shape: tuple[int, ...]) -> Init:
        init = blueprint.init(name, shape)
        is_constant = init.kind == "constant" and jitter > 0
        return Init.normal(mean=init.mean, std=jitter) if is_constant else init

    return rule


def initialise_whole(model: nn.Module, rule: InitRule, *, seed: int) -> nn.Module:
    """Give a whole model, on the meta device or real, the initial values its shards would get."""
    if any(parameter.is_meta for parameter in model.parameters()):
        _allocate(model)
    for name, parameter in [*model.named_parameters(), *named_biases([model]).items()]:
        shape = tuple(parameter.shape)
        fill_(
            parameter.detach(),
            rule(name, shape),
            seed=seed,
            name=name,
            global_shape=shape,
            offsets=(0,) * len(shape),
        )
    return model


def _allocate(model: nn.Module) -> None:
    """Give a model on the meta device memory. Unlike ``to_empty``, tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, leaf, made[id(parameter)])
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                setattr(module, leaf, torch.empty_like(buffer, device="cpu"))


def build_data(config: RunConfig) -> TokenSource:
    """Build the source of global batches."""
    return open_source(config)


def build_tensor(config: RunConfig) -> TensorParallel:
    """Return how layers are spread over tp."""
    section = config.tensor
    return TensorParallel(
        sequence_parallel=section.sequence_parallel,
        overlap="chunks" if section.overlaps else "none",
    )


def build_recompute(config: RunConfig) -> Recompute:
    """Return what is computed again in the backward pass."""
    return Recompute(parts=config.recompute.parts)


def build_plans(config: RunConfig) -> tuple[Pipeline, FSDP, Context]:
    """Return the plans of ``parallelize`` for the other axes."""
    pipeline = Pipeline(
        schedule=config.pipeline.schedule,
        num_microbatches=config.pipeline.num_microbatches,
        stages_per_rank=config.pipeline.stages_per_rank,
        layers_per_stage=config.pipeline.layers_per_stage,
    )
    fsdp = FSDP(wrap=config.fsdp.wrap, reshard_after_forward=config.fsdp.reshard)
    context = Context(
        ulysses_degree=config.context.ulysses_degree, load_balance=config.context.load_balance
    )
    return pipeline, fsdp, context


def build_program(
    config: RunConfig,
    precision: Numerics,
    *,
    mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    starts: bool = True,
) -> Program:
    """Build this rank's part of the run that ``config`` describes. Collective over the world.

    Args:
        config: The run.
        precision: Dtypes of the run.
        mesh: The mesh; None: it is built here.
        prepare: Called with the whole model before it is cut.
        starts: Read the weights of ``model.start_from``; False: others will be loaded.
    """
    if mesh is None:
        mesh = build_mesh(config.mesh.degrees, config.device)
    model, blueprint = build_pieces(config, precision.master)
    rule = init_rule(config, blueprint)
    if not any(parameter.is_meta for parameter in model.parameters()):
        initialise_whole(model, rule, seed=config.align.seed)
    if prepare is not None:
        prepare(model)
    pipeline, fsdp, context = build_plans(config)
    program = parallelize(
        model,
        mesh,
        blueprint=blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        context=context,
        tensor=build_tensor(config),
        recompute=build_recompute(config),
        compiling=Compile(backend=config.compile.backend),
        precision=precision.precision,
        loss_chunks=config.loss.chunks,
        init=rule,
        seed=config.align.seed,
    )
    if starts:
        start_program(program, config)
    return program
