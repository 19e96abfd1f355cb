"""One pipeline stage as a module: pieces of a model under their global names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.contiguous import contiguous_gradient
from paralign.errors import ConfigError
from paralign.loss import token_cross_entropy_sum
from paralign.parallel.loss_chunks import ChunkedHead, checked_epilogue


class _Namespace(nn.Module):
    """A dotted-name container: it owns nothing itself and only keeps global names intact."""

    def forward(self) -> None:
        raise RuntimeError("a namespace is never called")


class Stage(nn.Module):
    """The pieces of one stage, under the same fully qualified names as in the whole model.

    ``named_parameters()`` of all stages together are exactly those of the model, so nobody remaps
    names.

    Args:
        model: The whole model; the pieces are taken over, not copied.
        blueprint: How the pieces are composed.
        layers: Global indices of this stage's layers.
        is_first: Whether this stage owns the prologue.
        is_last: Whether this stage owns the epilogue.
    """

    def __init__(
        self,
        model: nn.Module,
        blueprint: Blueprint,
        *,
        layers: Sequence[int],
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self._blueprint = blueprint
        self._is_first = is_first
        self._is_last = is_last
        self._layer_names = [f"{blueprint.layers_name}.{index}" for index in layers]
        names = list(self._layer_names)
        names += blueprint.prologue_names if is_first else ()
        names += blueprint.epilogue_names if is_last else ()
        for name in names:
            _adopt(self, model, name)
        self.seq_len: int | None = None  # global; set by the runtime before the first step
        self.normaliser = 1.0  # of token losses, in the step that runs
        self._chunked: ChunkedHead | None = None

    @property
    def layer_names(self) -> list[str]:
        """Global names of this stage's layers, in order."""
        return list(self._layer_names)

    @property
    def is_first(self) -> bool:
        """Whether this stage owns the prologue."""
        return self._is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage owns the epilogue."""
        return self._is_last

    def chunk_loss(self, num_chunks: int) -> None:
        """Compute head and loss in chunks; call it after tensor parallelism and before FSDP."""
        name = self._blueprint.head_name
        if self._is_last and name is not None:
            self._chunked = ChunkedHead(self.get_submodule(name), num_chunks)

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        """Run this stage on one micro-batch.

        Shapes (b rows of the micro-batch, S local sequence):
            x: tokens ``[b, S]`` on the first stage, the previous stage's output on the others.
            batch: ``tokens``, ``positions`` and ``labels``, each ``[b, S]``, and with dropout
                ``draws``.
            returns: the next stage's ``x``; on the last stage the sum of token losses, a scalar, so
                that no logits are kept until the step ends.

        In evaluation mode (``stage.eval()``) the blueprint is not told ``num_tokens``.
        """
        assert self.seq_len is not None
        given: dict[str, Tensor] = batch
        if self.training:  # else routers are to count nothing
            # On the CPU, where reading it waits for nothing.
            given = {**batch, "num_tokens": torch.tensor(self.normaliser, dtype=torch.float64)}
        context = self._blueprint.context(given, seq_len=self.seq_len)
        if self._is_first:
            x = self._blueprint.prologue(self, batch, context)
        else:
            x = contiguous_gradient(x)  # it is sent to the previous stage
        for name in self._layer_names:
            x = self._blueprint.layer(self.get_submodule(name), x, context)
        if self._is_last:
            epilogue = partial(self._blueprint.epilogue, self, x, context)
            if self._chunked is not None:
                return self._chunked.sum_of_losses(epilogue, batch["labels"])
            return token_cross_entropy_sum(epilogue(), batch["labels"])
        # gloo cannot send a strided tensor, and a split backward pass cannot start at a view.
        return x.clone(memory_format=torch.contiguous_format) if _is_strided(x) else x


def _is_strided(x: Tensor) -> bool:
    return x._is_view() or not x.is_contiguous()


def _adopt(root: nn.Module, model: nn.Module, name: str) -> None:
    """Hang the module or parameter called ``name`` of ``model`` under ``root`` at the same name."""
    *path, leaf = name.split(".")
    parent, holder = model, root
    for part in path:
        parent = getattr(parent, part)
        if part not in holder._modules:
            holder.add_module(part, _Namespace())
        child = holder._modules[part]
        assert child is not None
        holder = child
    piece = getattr(parent, leaf)
    if isinstance(piece, nn.Parameter):
        holder.register_parameter(leaf, piece)
    else:
        holder.add_module(leaf, piece)


def meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy ``model`` onto the meta device without copying its data.

    Args:
        model: Any module.
        dtype: Floating dtype of the copy; None keeps each tensor's own.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    skeleton = copy.deepcopy(model, memo)
    return skeleton if dtype is None else skeleton.to(dtype)


def boundary_tensors(
    skeleton: nn.Module,
    blueprint: Blueprint,
    *,
    splits: Sequence[range],
    rows: int,
    local_seq: int,
    stream_parts: int = 1,
    chunks_loss: bool = False,
    stream_dtype: torch.dtype | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return each stage's input and output as meta tensors, so that no stage runs to find shapes.

    torch's pipelining would otherwise run an extra real forward and backward of every stage at the
    first step, which fires hooks, moves random streams and counts tokens twice.

    Args:
        skeleton: The whole model on the meta device, in the dtype that stages compute in.
        blueprint: How the pieces are composed.
        splits: Layer indices of every stage, in order.
        rows: Rows of one micro-batch.
        local_seq: Tokens of a row that one rank is fed.
        stream_parts: Ranks that share these tokens between blocks: tp with sequence parallel.
        chunks_loss: The loss will be computed in chunks of the head's output.
        stream_dtype: What the stream between layers must be in, where it was asked for.

    Raises:
        ConfigError: The epilogue cannot be run in chunks, or the stream is in another dtype.
    """
    entry = torch.empty(rows, local_seq, dtype=torch.int64, device="meta")
    tokens = entry[:, : local_seq // stream_parts]
    batch = {"tokens": tokens, "positions": tokens, "labels": tokens, "draws": tokens}
    return list(_walk(skeleton, blueprint, splits, batch, entry, chunks_loss, stream_dtype))


def _walk(
    skeleton: nn.Module,
    blueprint: Blueprint,
    splits: Sequence[range],
    batch: dict[str, Tensor],
    entry: Tensor,
    chunks_loss: bool,
    stream_dtype: torch.dtype | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    # The skeleton is not parallel: to it the rank's part of the sequence is the whole of it.
    context = blueprint.context(batch, seq_len=batch["tokens"].shape[1])
    with torch.no_grad():
        x = blueprint.prologue(skeleton, batch, context)
        _check_stream("the prologue", x, stream_dtype)
        for number, layers in enumerate(splits):
            for index in layers:
                layer = skeleton.get_submodule(f"{blueprint.layers_name}.{index}")
                x = blueprint.layer(layer, x, context)
                _check_stream(f"{blueprint.layers_name}.{index}", x, stream_dtype)
            if number == len(splits) - 1:
                epilogue, labels = (
                    partial(blueprint.epilogue, skeleton, x, context),
                    batch["labels"],
                )
                if chunks_loss:
                    head = skeleton.get_submodule(str(blueprint.head_name))
                    logits = checked_epilogue(epilogue, head, labels)
                else:
                    logits = epilogue()
                x = token_cross_entropy_sum(logits, labels)
            yield entry, _like(x)
            entry = _like(x)


def _check_stream(piece: str, x: Tensor, dtype: torch.dtype | None) -> None:
    if dtype is not None and x.dtype != dtype:
        raise ConfigError(
            f"residual={dtype}: {piece} returns {x.dtype}, so the stream does not keep its dtype. "
            "Name what starts it in the blueprint's stream_sources and every module that takes it "
            "as input in stream_readers, or leave residual out."
        )


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=True)
