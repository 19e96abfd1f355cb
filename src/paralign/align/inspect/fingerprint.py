"""Read a recorded piece once, in parts, and keep what most checks need of it."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.measure import PART_ELEMENTS
from paralign.align.trace import TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, boxes


@dataclass(frozen=True)
class Fingerprint:
    """A piece in a few numbers: equal digests are equal bits, in local order."""

    elements: int
    norm: float
    """Of the finite elements, in fp64."""
    largest: float
    """Largest magnitude of a finite element."""
    zeros: int
    nonfinite: int
    is_constant: bool
    """All elements are the same number, so equality with another such piece says nothing."""
    digest: bytes

    @property
    def is_zero(self) -> bool:
        """Whether it has elements and all of them are zero."""
        return self.elements > 0 and self.zeros == self.elements


def take_fingerprint(reader: TraceReader, entry: TensorEntry) -> Fingerprint:
    """Read the piece of ``entry``; at most one part is in memory at a time.

    Raises:
        TraceError: The payload is damaged.
    """
    hashed = hashlib.blake2b(digest_size=16)
    elements = zeros = nonfinite = 0
    norm = largest = 0.0
    first: float | None = None
    is_constant = True
    for part in read_parts(reader, entry):
        add_bytes(hashed, part)
        values = part.reshape(-1).to(torch.float64)
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            nonfinite += int((~finite).sum())
            is_constant = False
            values = values[finite]
        elements += part.numel()
        if values.numel() == 0:
            continue
        zeros += int((values == 0).sum())
        norm = math.hypot(norm, float(torch.linalg.vector_norm(values)))
        low, high = (float(bound) for bound in torch.aminmax(values))
        largest = max(largest, -low, high)
        first = low if first is None else first
        is_constant = is_constant and low == high == first
    return Fingerprint(elements, norm, largest, zeros, nonfinite, is_constant, hashed.digest())


def distance(reader: TraceReader, entry: TensorEntry, other: TensorEntry) -> tuple[float, float]:
    """Return the relative distance of two pieces of one shape, and ``entry``'s factor to ``other``.

    The factor is the number by which ``other`` comes closest to ``entry``; NaN where there is none.
    """
    error = base = dot = 0.0
    for x_part, r_part in zip(read_parts(reader, entry), read_parts(reader, other), strict=True):
        x, r = x_part.reshape(-1).to(torch.float64), r_part.reshape(-1).to(torch.float64)
        error = _join(error, float(torch.linalg.vector_norm(x - r)))
        base = _join(base, float(torch.linalg.vector_norm(r)))
        dot += float(torch.dot(x, r))
    factor = dot / base / base if base > 0 else math.nan
    if error == 0.0:
        return 0.0, 1.0
    return error / base if base != 0 else math.inf, factor


def relative_to(
    reader: TraceReader, entry: TensorEntry, other: TensorEntry, factor: float
) -> float:
    """Return the relative distance of ``entry`` from ``factor`` times ``other``."""
    error = base = 0.0
    for x_part, r_part in zip(read_parts(reader, entry), read_parts(reader, other), strict=True):
        r = r_part.reshape(-1).to(torch.float64) * factor
        difference = x_part.reshape(-1).to(torch.float64) - r
        error = _join(error, float(torch.linalg.vector_norm(difference)))
        base = _join(base, float(torch.linalg.vector_norm(r)))
    return error / base if base > 0 else math.inf


def norm_of_sum(reader: TraceReader, entries: Sequence[TensorEntry]) -> float:
    """Return the norm of a tensor whose summands the ranks hold."""
    weight = 1.0 / len(entries) if entries[0].partial_op == "avg" else 1.0
    norm = 0.0
    for parts in zip(*(read_parts(reader, entry) for entry in entries), strict=True):
        total = torch.zeros(parts[0].shape, dtype=torch.float64)
        for part in parts:
            total += part.to(torch.float64) * weight
        norm = _join(norm, float(torch.linalg.vector_norm(total)))
    return norm


def read_parts(reader: TraceReader, entry: TensorEntry) -> Iterator[Tensor]:
    """Yield a piece in parts of at most ``PART_ELEMENTS``, in an order that its map alone gives."""
    for box in parts_of(entry):
        yield reader.read(entry, box)


def parts_of(entry: TensorEntry) -> Iterator[Box]:
    """Yield the boxes that :func:`read_parts` reads."""
    if entry.flat is not None:
        held = Box((0,), (0,), entry.held_shape)
        yield from held.split(PART_ELEMENTS) if held.numel else ()
        return
    for box in boxes(entry.map):
        yield from box.split(PART_ELEMENTS)


def add_bytes(hashed: hashlib.blake2b, tensor: Tensor) -> None:
    """Feed the memory of ``tensor`` to a hash, without NumPy."""
    if tensor.numel() == 0:
        return
    held = tensor.contiguous()
    size = held.numel() * held.element_size()
    hashed.update((ctypes.c_char * size).from_address(held.data_ptr()))


def _join(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else math.hypot(a, b)
