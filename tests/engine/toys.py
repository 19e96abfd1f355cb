"""The small model and the raw torch pipeline that every trap is shown on.

Nothing here is paralign's: only torch, so that what goes wrong is torch's own doing.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

VOCAB, WIDTH, LAYERS, ROWS, SEQ = 16, 8, 4, 8, 4


class Block(nn.Module):
    """One residual layer with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Model(nn.Module):
    """Embedding, four blocks, norm, head; a stage of it lacks some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def build(*, tied: bool = False) -> Model:
    """Return the same fp64 model on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model().double()
    if tied:
        assert model.embedding is not None
        assert model.head is not None
        model.head.weight = model.embedding.weight
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return the global batch: tokens and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, ROWS, SEQ), generator=generator)
    return tokens, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses over the global number of tokens, so that gradients are sums."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (ROWS * SEQ)


def reference(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of one device on the whole batch; ``model`` stays as it was."""
    model = copy.deepcopy(model)
    tokens, labels = batch()
    loss_of(model(tokens), labels).backward()
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


def split(model: Model, stage: int, num_stages: int) -> Model:
    """Return a copy of ``model`` with only what ``stage`` owns; names stay global."""
    part = copy.deepcopy(model)
    for i in range(LAYERS):
        if i * num_stages // LAYERS != stage:
            del part.layers[str(i)]
    if stage > 0:
        part.embedding = None
    if stage < num_stages - 1:
        part.norm = part.head = None
    return part


def sum_gradients(module: nn.Module) -> None:
    """Make every FSDP unit inside ``module`` add gradients up instead of averaging them."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)


def ends(stage: Model) -> list[nn.Module]:
    """Return the modules of a stage that are no blocks."""
    return [m for m in (stage.embedding, stage.norm, stage.head) if m is not None]


def wrap_blocks(stage: Model, mesh: DeviceMesh, **options: Any) -> None:
    """Wrap each block and the stage root: the usual grouping."""
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(stage, mesh=mesh, **options)


def wrap_children(stage: Model, mesh: DeviceMesh, **options: Any) -> None:
    """Wrap each block, embedding, norm and head, but not the stage root."""
    for child in [*stage.layers.values(), *ends(stage)]:
        fully_shard(child, mesh=mesh, **options)


def build_mesh(pp: int) -> DeviceMesh:
    """Return a mesh of ``pp`` pipeline ranks; what is left of the world is for data."""
    world = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (pp, world // pp), mesh_dim_names=("pp", "dp"))


@dataclass
class Pipe:
    """One of torch's schedules over the model, and what this rank holds of it."""

    schedule: Any
    stages: list[Model]  # this rank's; most traps need only one pipeline rank, which holds all
    mesh: DeviceMesh

    def step(self) -> None:
        """Run one step on this rank's rows."""
        self.run(self.schedule.step)

    def run(self, method: Callable[..., Any]) -> None:
        """Call ``schedule.step`` or ``schedule.eval`` on this rank's rows."""
        tokens, labels = (self.rows(t) for t in batch())
        first = any(stage.embedding is not None for stage in self.stages)
        last = any(stage.head is not None for stage in self.stages)
        method(*([tokens] if first else []), target=labels if last else None, losses=[])

    def rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a global tensor."""
        dp = self.mesh["dp"]
        return tensor.chunk(dp.size())[dp.get_local_rank()]

    def errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """Return the relative error of every gradient; infinite where it is None."""
        return gradient_errors(self.stages, expected)


def pipe(
    model: Model,
    name: str,
    wrap: Callable[[Model, DeviceMesh], None] | None = None,
    *,
    num_microbatches: int = 4,
    num_stages: int | None = None,
    pp: int = 1,
    static: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
    scale_grads: bool = False,
) -> Pipe:
    """Build torch's schedule ``name`` over ``model``.

    ``num_stages`` in all is one a rank for GPipe and 1F1B, else two; looped schedules take more.
    """
    mesh = build_mesh(pp)
    single = name in ("GPipe", "1F1B")
    count = num_stages or (pp if single else 2 * pp)
    rank = mesh["pp"].get_local_rank()
    looped = range(rank, count, pp)
    mine = (rank, count - 1 - rank) if name in ("ZBVZeroBubble", "DualPipeV") else looped
    rows = ROWS // mesh["dp"].size() // num_microbatches
    stages, torch_stages = [], []
    for i in mine:
        stage = split(model, i, count)
        if wrap is not None:
            wrap(stage, mesh["dp"])
            sum_gradients(stage)
        given: dict[str, Any] = shapes(stage, rows) if static else {}
        group = mesh["pp"].get_group()
        stages.append(stage)
        torch_stages.append(
            PipelineStage(stage, i, count, torch.device("cpu"), group=group, **given)
        )
    schedule = getattr(schedules, f"Schedule{name}")(
        torch_stages[0] if single else torch_stages,
        num_microbatches,
        loss_fn=loss,
        scale_grads=scale_grads,
    )
    return Pipe(schedule, stages, mesh)


def shapes(stage: Model, rows: int) -> dict[str, Tensor]:
    """Return the static input and output of a stage, so that torch need not guess them."""
    dtype = next(stage.parameters()).dtype
    hidden = torch.empty(rows, SEQ, WIDTH, dtype=dtype, requires_grad=True)
    tokens = torch.empty(rows, SEQ, dtype=torch.long)
    logits = torch.empty(rows, SEQ, VOCAB, dtype=dtype, requires_grad=True)
    return {
        "input_args": hidden if stage.embedding is None else tokens,
        "output_args": hidden if stage.head is None else logits,
    }


def whole_gradients(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the gathered fp64 gradient of every parameter that has one."""
    named = [pair for module in modules for pair in module.named_parameters(remove_duplicate=False)]
    grads = {name: p.grad for name, p in named if p.grad is not None}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()
        for name, grad in grads.items()
    }


def gradient_errors(modules: Sequence[nn.Module], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative Frobenius error of every trainable parameter's gradient."""
    grads = whole_gradients(modules)
    named = [pair for module in modules for pair in module.named_parameters(remove_duplicate=False)]
    return {
        name: float((grads[name] - expected[name]).norm() / expected[name].norm())
        if name in grads
        else math.inf
        for name, p in named
        if p.requires_grad
    }


def error_of(action: Callable[[], object]) -> str:
    """Return the class and first line of the first cause of what ``action`` raises, or ``""``."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    try:
        action()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    return ""


def count_collectives(action: Callable[[], object]) -> Counter[str]:
    """Run ``action`` and count the collectives that reach torch's dispatcher, by operator name.

    The profiler sees them whatever torch's Python functions are called; ``CommDebugMode`` raises
    inside a pipeline stage.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        action()
    return Counter({event.key: event.count for event in profiled.key_averages()})
