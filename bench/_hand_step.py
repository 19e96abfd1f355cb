"""A pipeline x FSDP x context-parallel training step composed by hand from torch's primitives.

What a careful user would write for this one model and this one plan: stock ``PipelineStage`` and
schedule, ``fully_shard`` on every block and on the root, an all-to-all in front of and behind
attention. Of paralign it uses the plain model, and nothing that knows of a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from paralign.models.llama.model import Llama, llama_rotary
from paralign.models.llama.presets import LlamaConfig

IGNORED = -100


class HandStep:
    """One rank's share of a training run: batch in, loss and gradient norm out.

    Args:
        model: The whole model with its initial weights, the same on every rank; taken over.
        degrees: Ranks of pp, dp and cp, outermost first.
        schedule: ``GPipe`` or ``1F1B``.
        num_microbatches: Micro-batches of a step.
        clip: Largest gradient norm.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self,
        model: Llama,
        *,
        degrees: tuple[int, int, int],
        schedule: str,
        num_microbatches: int,
        clip: float,
        lr: float,
    ) -> None:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp", "cp"))
        self._pp, self._dp, self._cp = degrees
        self._indices = {axis: mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp")}
        self._schedule_name = schedule
        self._num_microbatches = num_microbatches
        self._clip = clip
        self._config = model.config
        self._group = mesh.get_group("pp")
        self._stage = _Stage(model, index=self._indices["pp"], num_stages=self._pp)
        for layer in self._stage.layers:
            assert isinstance(layer, nn.Module)
            layer.attention.core = _Ulysses(layer.attention.core, mesh.get_group("cp"))  # type: ignore[union-attr, arg-type]
        _shard(self._stage, mesh["dp", "cp"]._flatten("fsdp"))
        self._optimizer = torch.optim.AdamW(self._stage.parameters(), lr=lr)
        self._schedule: Any = None
        self._num_tokens = 1

    def __call__(self, global_batch: Mapping[str, Tensor]) -> tuple[float, float]:
        """Train one step on ``tokens`` and shifted ``labels``, each ``[B, S]``.

        Returns:
            The loss of the global batch and the gradient norm before clipping, on every rank.
        """
        tokens, labels, positions = self._cut(global_batch)
        if self._schedule is None:
            self._schedule = self._build_schedule(*tokens.shape)
        self._num_tokens = int((global_batch["labels"] != IGNORED).sum())

        losses: list[Tensor] = []
        inputs = (tokens,) if self._indices["pp"] == 0 else ()
        targets = {"target": labels, "losses": losses} if self._is_last else {}
        self._schedule.step(*inputs, positions=positions, return_outputs=False, **targets)
        loss = torch.zeros((), dtype=torch.float64)
        for share in losses:
            loss += share.detach()
        dist.all_reduce(loss)

        norm = self._clip_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss), float(norm)

    @property
    def _is_last(self) -> bool:
        return self._indices["pp"] == self._pp - 1

    def _cut(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, seq_len = (
            size // n for size, n in zip(batch["tokens"].shape, (self._dp, self._cp), strict=True)
        )
        row, column = self._indices["dp"] * num_rows, self._indices["cp"] * seq_len
        here = (slice(row, row + num_rows), slice(column, column + seq_len))
        positions = torch.arange(column, column + seq_len).repeat(num_rows, 1)
        return batch["tokens"][here].contiguous(), batch["labels"][here].contiguous(), positions

    def _build_schedule(self, num_rows: int, seq_len: int) -> Any:
        rows = num_rows // self._num_microbatches
        tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        hidden = self._boundary(rows, seq_len, self._config.hidden_size)
        logits = self._boundary(rows, seq_len, self._config.vocab_size)
        stage = PipelineStage(
            self._stage,
            self._indices["pp"],
            self._pp,
            torch.device("cpu"),
            input_args=tokens if self._indices["pp"] == 0 else hidden,
            output_args=logits if self._is_last else hidden,
            group=self._group,
        )
        return get_schedule_class(self._schedule_name)(
            stage,
            self._num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _boundary(self, *shape: int) -> Tensor:
        dtype = next(self._stage.parameters()).dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / self._num_tokens

    def _clip_gradients(self) -> Tensor:
        grads = [p.grad.to_local() for p in self._stage.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        squares = torch.nn.utils.get_total_norm(grads).double().square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale = torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.dtype))
        return norm


class _Stage(nn.Module):
    """This rank's layers, and on the ends the embedding or the head."""

    def __init__(self, model: Llama, *, index: int, num_stages: int) -> None:
        super().__init__()
        self._config: LlamaConfig = model.config
        count = len(model.layers) // num_stages
        self.embedding = model.embedding if index == 0 else None
        self.layers = nn.ModuleList(list(model.layers)[index * count : (index + 1) * count])
        self.norm = model.norm if index == num_stages - 1 else None
        self.head = model.head if index == num_stages - 1 else None

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        rotary = llama_rotary(self._config, positions)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _shard(stage: nn.Module, mesh: DeviceMesh) -> None:
    layers = stage.layers
    assert isinstance(layers, nn.ModuleList)
    for module in (*layers, stage):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


class _Ulysses(nn.Module):
    """Attention over the whole sequence and a share of the heads."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._core = core
        self._group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: None, is_causal: bool) -> Tensor:
        q, k, v = _Exchange.apply(self._group, 1, 2, q, k, v)  # type: ignore[no-untyped-call]
        core = self._core(q, k, v, mask=mask, is_causal=is_causal)
        (out,) = _Exchange.apply(self._group, 2, 1, core)  # type: ignore[no-untyped-call]
        result: Tensor = out
        return result


class _Exchange(torch.autograd.Function):
    """Split one dim over the ranks, make another whole; all tensors in one all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, split: int, concat: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route = (group, split, concat)
        return _exchange(group, split, concat, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group, split, concat = ctx.route
        return (None, None, None, *_exchange(group, concat, split, grads))


def _exchange(
    group: dist.ProcessGroup, split: int, concat: int, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    degree = dist.get_world_size(group)
    pieces = [x.unflatten(split, (degree, -1)).movedim(split, 0) for x in tensors]
    send = torch.cat([piece.reshape(degree, -1) for piece in pieces], dim=1)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    parts = received.split([x.numel() // degree for x in tensors], dim=1)
    return tuple(
        torch.cat([row.view(piece.shape[1:]) for row in part], dim=concat)
        for part, piece in zip(parts, pieces, strict=True)
    )
