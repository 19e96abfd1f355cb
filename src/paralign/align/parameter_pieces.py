"""Entries of a trace for parameters: their values, gradients and optimizer states, piece by piece.

What a rank holds of them is in ``local_layout``; where their values are kept in ``sources``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paralign.align.local_layout import HeldPiece, LocalLayouts
from paralign.align.names import NamedParameter
from paralign.align.placements import RankAxes, is_dtensor, local_of
from paralign.align.sources.choose import reader_of
from paralign.align.sources.reader import Reader
from paralign.align.trace import Kind, TensorEntry
from paralign.align.trace_writer import dtype_name

Entries = list[tuple[TensorEntry, "Tensor | None"]]

MODEL_AXES = ("pp", "tp", "ep")
"""Axes whose ranks compute with the same tokens; all others have tokens of their own."""


@dataclass(frozen=True)
class ParameterPieces:
    """The parameters of this rank and how to read them.

    Args:
        parameters: All of them, by global name.
        layouts: What the rank holds of each.
        readers: Libraries to ask, in order.
    """

    parameters: Sequence[NamedParameter]
    layouts: LocalLayouts
    readers: tuple[Reader, ...]

    def values(self, kind: str, step: int) -> Entries:
        """Return the parameters as they are now."""
        found: Entries = []
        for named in self.parameters:
            reader = reader_of(self.readers, named.parameter)
            value = reader.value(named.parameter)
            if value is not None and self._writes(reader, named, value):
                found += self._entries(kind, step, named, value)
        return found

    def gradients(self, kind: str, step: int, optimizers: Sequence[Any]) -> Entries:
        """Return the gradients that the optimizer is about to use, also those that are None."""
        found: Entries = []
        for named in self.parameters:
            reader = reader_of(self.readers, named.parameter)
            gradient = reader.gradient(named.parameter)
            if gradient is None:
                shaped = reader.value(named.parameter) if reader.gathers else named.parameter
                if shaped is not None and self._writes(reader, named, shaped):
                    entries = self._entries(kind, step, named, shaped)
                    found += [(entry, None) for entry, _ in entries]
            elif self._writes(reader, named, gradient):
                owned = reader.owned(optimizers, named.parameter)
                found += self._entries(kind, step, named, gradient, owned=owned)
        return found

    def moments(self, step: int, optimizers: Sequence[Any]) -> tuple[Entries, list[dict[str, str]]]:
        """Return what the optimizers hold, and name and reason of what is not recorded."""
        found: Entries = []
        unknown: list[dict[str, str]] = []
        for named in self.parameters:
            reader = reader_of(self.readers, named.parameter)
            owned = reader.owned(optimizers, named.parameter)
            for state, value in reader.state(optimizers, named.parameter):
                tensor, why = _state_tensor(named, value, owned, whole=reader.gathers)
                if why:
                    unknown.append({"name": f"{named.name}.{state}", "why": why})
                elif tensor is not None and self._writes(reader, named, tensor):
                    found += self._entries(
                        Kind.MOMENT, step, named, tensor, state=state, owned=owned
                    )
        return found, unknown

    def micro_gradients(self, step: int, micro_batch: int, gradients: dict[int, Tensor]) -> Entries:
        """Return what a micro-batch added, by the place of its parameter: summands over data."""
        found: Entries = []
        for number, gradient in sorted(gradients.items()):
            named = self.parameters[number]
            for entry, tensor in self._entries(
                Kind.MICRO_GRAD, step, named, gradient, gathered=True
            ):
                summed = tuple(
                    axis
                    for axis in entry.replicated_over
                    if axis not in MODEL_AXES or _is_sequence_parallel(named, axis)
                )
                copies = tuple(axis for axis in entry.replicated_over if axis not in summed)
                partial = (*entry.partial_over, *summed)
                found.append(
                    (
                        replace(
                            entry,
                            micro_batch=micro_batch,
                            replicated_over=copies,
                            partial_over=partial,
                        ),
                        tensor,
                    )
                )
        return found

    def norms(self) -> list[Tensor | None]:
        """Return the norm of every local gradient: what tells whether one has been changed."""
        found: list[Tensor | None] = []
        for named in self.parameters:
            reader = reader_of(self.readers, named.parameter)
            gradient = None if reader.gathers else reader.gradient(named.parameter)
            found.append(None if gradient is None else torch.linalg.vector_norm(local_of(gradient)))
        return found

    @property
    def have_gradients(self) -> bool:
        """Whether any parameter has a gradient; where asking communicates: yes."""
        for named in self.parameters:
            reader = reader_of(self.readers, named.parameter)
            if reader.gathers or reader.gradient(named.parameter) is not None:
                return True
        return False

    @property
    def local_bytes(self) -> int:
        """Bytes of all values that this rank writes."""
        tensors = {id(named.parameter): local_of(named.parameter) for named in self.parameters}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _writes(self, reader: Reader, named: NamedParameter, tensor: Tensor) -> bool:
        """Whether this rank writes a value that a library has put together on all of them."""
        if not reader.gathers or tensor is named.parameter:
            return True
        return is_first(self.layouts.axes)

    def _entries(
        self,
        kind: str,
        step: int,
        named: NamedParameter,
        tensor: Tensor,
        *,
        state: str | None = None,
        owned: tuple[int, int] | None = None,
        gathered: bool = False,
    ) -> Iterator[tuple[TensorEntry, Tensor]]:
        reader = reader_of(self.readers, named.parameter)
        alone = reader.gathers and not gathered and tensor is not named.parameter
        for piece in self.layouts.place(named, tensor, owned=owned, gathered=gathered):
            if alone:  # one rank writes what all of them have got
                kept = tuple(axis for axis in piece.replicated_over if axis in MODEL_AXES)
                piece = replace(piece, replicated_over=kept)
            yield _entry(kind, step, named, tensor, piece, state), piece.tensor


def is_first(axes: RankAxes) -> bool:
    """Whether this rank is the first of those that hold the same part of the model."""
    return all(at == 0 for axis, at in axes.coordinates.items() if axis not in MODEL_AXES)


def _entry(
    kind: str,
    step: int,
    named: NamedParameter,
    tensor: Tensor,
    piece: HeldPiece,
    state: str | None,
) -> TensorEntry:
    source = named.source if named.part is None else f"{named.source}[{named.part.index}]"
    return TensorEntry(
        kind=kind,
        name=named.name,
        step=step,
        dtype=dtype_name(tensor.dtype, named.name),
        shape=piece.shape,
        map=piece.map,
        state=state,
        aliases=named.aliases,
        source=None if source == named.name else source,
        trainable=named.parameter.requires_grad,
        replicated_over=piece.replicated_over,
        partial_over=piece.partial_over,
        partial_op=piece.partial_op,
    )


def _is_sequence_parallel(named: NamedParameter, axis: str) -> bool:
    """Whether ranks of tp feed a parameter with tokens of their own, as Megatron marks it."""
    return axis == "tp" and bool(getattr(named.parameter, "sequence_parallel", False))


def _state_tensor(
    named: NamedParameter, value: Any, owned: tuple[int, int] | None, *, whole: bool
) -> tuple[Tensor | None, str]:
    """Return an optimizer state as a tensor, or why its part of the global tensor is not known."""
    if value is None:
        return None, ""
    if isinstance(value, bool | int | float):
        return torch.tensor(value), ""
    if not isinstance(value, Tensor):
        return None, f"the state is a {type(value).__name__}, not a tensor"
    known = [tuple(local_of(named.parameter).shape), tuple(named.parameter.shape)]
    if owned is not None:
        known.append((owned[1] - owned[0],))
    if whole or is_dtensor(value) or value.dim() == 0 or tuple(value.shape) in known:
        return value, ""
    return (
        None,
        f"its shape {tuple(value.shape)} is not the parameter's, so what it is of the whole is "
        "not known",
    )
