"""Choose the reader of each parameter."""

from __future__ import annotations

from typing import Any

from paralign.align.sources import deepspeed, megatron
from paralign.align.sources.deepspeed import DEEPSPEED
from paralign.align.sources.megatron import MEGATRON
from paralign.align.sources.reader import Reader
from paralign.align.sources.torch_tensors import TORCH
from paralign.errors import ConfigError

SOURCES = ("auto", "torch", "megatron", "deepspeed")


def readers_of(source: str) -> tuple[Reader, ...]:
    """Return the readers to ask, in this order; torch's knows every parameter.

    Raises:
        ConfigError: There is no such source.
    """
    chosen: dict[str, tuple[Reader, ...]] = {
        "auto": (DEEPSPEED, MEGATRON, TORCH),
        "torch": (TORCH,),
        "megatron": (MEGATRON, TORCH),
        "deepspeed": (DEEPSPEED, TORCH),
    }
    if source not in chosen:
        raise ConfigError(f"source={source!r} is not one of {', '.join(SOURCES)}")
    return chosen[source]


def reader_of(readers: tuple[Reader, ...], parameter: Any) -> Reader:
    """Return the first of ``readers`` that knows ``parameter``."""
    return next(reader for reader in readers if reader.knows(parameter))


def norm_of_step(optimizer: Any, result: Any) -> float | None:
    """Return the gradient norm that a ``step()`` which clips by itself tells, if it does."""
    norm = megatron.norm_of_step(result)
    return deepspeed.norm_of_step(optimizer) if norm is None else norm
