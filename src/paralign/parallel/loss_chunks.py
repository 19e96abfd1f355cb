"""The loss in chunks of the sequence, so that the logits of all tokens never exist at once.

The head stands last in the model and treats each token alone, and the loss is a sum over tokens::

    hidden [B, S, D]   | chunk 0 | chunk 1 | ... |     one after the other, forward and backward
    logits [B, S/K, V]      v                          made, used for the loss, and freed
    loss                  sum 0  +  sum 1  +  ...

Each chunk is computed once more in the backward pass, since its logits were freed: one more product
with the head's weight, and under tp the chunk's messages once more.

Ref:
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (recomputation).
    https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paralign.blueprint import Blueprint
from paralign.errors import ConfigError, LayoutError
from paralign.loss import token_cross_entropy_sum


def chunk_bounds(num_tokens: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return where each chunk starts and stops; sizes differ by one at most.

    Raises:
        LayoutError: There are more chunks than tokens.
    """
    if not 1 <= num_chunks <= num_tokens:
        raise LayoutError(
            f"loss_chunks={num_chunks} must be at least 1 and at most the {num_tokens} tokens of a "
            f"row that a rank has at the head. Use loss_chunks={max(1, num_tokens)} or fewer."
        )
    at = [index * num_tokens // num_chunks for index in range(num_chunks + 1)]
    return list(pairwise(at))


def head_problems(model: nn.Module, blueprint: Blueprint, asks: str) -> list[str]:
    """Return why the head cannot be found by its name, one sentence each.

    Args:
        model: The whole model, on any device.
        blueprint: Its blueprint.
        asks: The option that needs it, for the message.
    """
    name = blueprint.head_name
    if name is None:
        return [
            f"{asks} needs the module that makes the logits, and {type(blueprint).__name__} does "
            "not name it. Set head_name to its name, such as 'head', or leave the option out"
        ]
    if not any(name == piece or name.startswith(f"{piece}.") for piece in blueprint.epilogue_names):
        return [
            f"{asks}: head_name={name!r} is in none of epilogue_names="
            f"{list(blueprint.epilogue_names)}. Name the module that makes the logits"
        ]
    if name not in dict(model.named_modules(remove_duplicate=False)):
        return [f"{asks}: head_name={name!r} is no module of the model"]
    return []


def checked_epilogue(epilogue: Callable[[], Tensor], head: nn.Module, labels: Tensor) -> Tensor:
    """Run ``epilogue``, and prove that the loss may be computed in the head instead.

    Costs nothing on the meta device, where every rank can do it before a step begins.

    Raises:
        ConfigError: It does not call the head once, or returns something else than the head's
            output.
        LayoutError: The head's input is not ``[B, S, D]``.
    """
    made: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        _check_input(args[0], labels)
        made.append(output)

    handle = head.register_forward_hook(note)
    try:
        logits: Tensor = epilogue()
    finally:
        handle.remove()
    if len(made) != 1 or made[0] is not logits:
        raise ConfigError(
            f"the epilogue calls the module head_name {len(made)} times and returns "
            f"{'its output' if any(logits is one for one in made) else 'something else'}: for a "
            "loss in chunks it must call it once and return its output. Move what comes after into "
            "the head, or use loss_chunks=1."
        )
    return logits


class ChunkedHead:
    """Stands in for the head's ``forward`` and returns the sum of token losses.

    Put it around a head that is tensor-parallel already and before FSDP: whoever hooks the module
    sees one call, whatever the number of chunks.

    Args:
        head: The module that makes the logits.
        num_chunks: Pieces of the sequence; they need not be equal.
    """

    def __init__(self, head: nn.Module, num_chunks: int) -> None:
        self._logits: Callable[[Tensor], Tensor] = head.forward
        self._num_chunks = num_chunks
        self._labels: Tensor | None = None  # of the micro-batch whose epilogue runs
        forward: Any = self
        head.forward = forward

    def sum_of_losses(self, epilogue: Callable[[], Tensor], labels: Tensor) -> Tensor:
        """Run ``epilogue``, which ends with the head, and return the sum of token losses.

        What it does besides must have been proven by :func:`checked_epilogue`.

        Shapes:
            labels: ``[B, S]`` int64.
            returns: scalar, as :func:`paralign.loss.token_cross_entropy_sum` of all logits.

        """
        self._labels = labels
        try:
            return epilogue()
        finally:
            self._labels = None

    def __call__(self, x: Tensor) -> Tensor:
        """Sum the losses of all tokens.

        Shapes (n ranks that share the stream over tp, else 1):
            x: ``[B, S / n, D]``.
            returns: scalar.
        """
        if self._labels is None:
            raise ConfigError(
                "the head was called outside of the loss: with loss_chunks it makes no logits. Use "
                "loss_chunks=1."
            )
        sums = [
            # Nothing here draws random numbers.
            checkpoint(self._one, piece, chosen, use_reentrant=False, preserve_rng_state=False)
            for piece, chosen in _pieces(x, self._labels, self._num_chunks)
        ]
        return torch.stack(sums).sum()

    def _one(self, x: Tensor, labels: Tensor) -> Tensor:
        return token_cross_entropy_sum(self._logits(x), labels)


def _pieces(x: Tensor, labels: Tensor, num_chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each chunk of the stream with the labels of its tokens, in the order of its logits.

    With sequence parallel, a chunk's logits are those of the same chunk of every rank's part, one
    rank after the other.
    """
    _check_input(x, labels)
    by_part = labels.view(labels.shape[0], -1, x.shape[1])
    for start, stop in chunk_bounds(x.shape[1], num_chunks):
        yield x[:, start:stop], by_part[:, :, start:stop].flatten(1)


def _check_input(x: Tensor, labels: Tensor) -> None:
    if x.ndim != 3 or x.shape[0] != labels.shape[0] or labels.shape[1] % x.shape[1]:
        raise LayoutError(
            f"the head's input has shape {tuple(x.shape)}, and the labels {tuple(labels.shape)}: "
            "for a loss in chunks it must be [B, S, D]. Transpose before the head, or use "
            "loss_chunks=1."
        )
