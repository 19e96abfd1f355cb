"""One entry of a trace's index: what a rank's piece of a tensor is, and where its values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paralign.layout import LocalMap, Span, local_shape

# Names as torch writes them without "torch.", and their safetensors codes.
DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class Kind:
    """The kinds of recorded tensors, in the order in which a step makes them."""

    INPUT = "input"  # whole numbers fed to the model: tokens, labels, positions
    PARAM = "param"  # before the first recorded step
    OUTPUT = "output"  # what a module returned, named by the module; in forward order
    OUTPUT_GRAD = "output_grad"  # the gradient of what a module returned; in backward order
    MICRO_GRAD = "micro_grad"  # what one micro-batch added to a gradient, before any reduction
    GRAD = "grad"  # as the optimizer is about to use them, before clipping
    CLIPPED_GRAD = "clipped_grad"  # after clipping, where that changed them
    MOMENT = "moment"  # one state of the optimizer after the step, named by ``state``
    PARAM_AFTER = "param_after"  # after the optimizer has stepped


TOKEN_KINDS = (Kind.INPUT, Kind.OUTPUT, Kind.OUTPUT_GRAD)
"""Kinds whose pieces a micro-batch's token map places; their ``map`` is of the micro-batch."""


@dataclass(frozen=True)
class TensorEntry:
    """One rank's piece of one tensor."""

    kind: str
    name: str
    step: int
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    map: LocalMap
    state: str | None = None
    """Name of the optimizer state, for moments."""
    aliases: tuple[str, ...] = ()
    """Other names of the same parameter on this rank (tied)."""
    source: str | None = None
    """Name in the module, where it differs; tells copies of one parameter on a rank apart."""
    trainable: bool = True
    replicated_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    partial_op: str = "sum"
    file: str | None = None
    """Payload file; None if there is no tensor (a gradient that is None)."""
    key: str | None = None
    micro_batch: int | None = None
    """Number of the micro-batch in the step, of the kinds that have one."""
    call: int = 0
    """Which call of the module in the micro-batch, from 0."""
    token_dims: tuple[int, int] | None = None
    """Dims that count rows and positions, of :data:`TOKEN_KINDS`; twice the same: both in one dim,
    rows outermost. None: the tensor has no such dims, or they are not known."""
    order: int | None = None
    """Place in the order of execution within the rank's step."""
    flat: tuple[int, int] | None = None
    """The piece is this range of the elements, in row-major order, of the tensor that ``map``
    describes (ZeRO, FSDP1); None: it is all of it."""
    true_shape: tuple[int, ...] | None = None
    """Global shape without padding (of a vocabulary), where ``shape`` counts some."""

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the payload."""
        return local_shape(self.map) if self.flat is None else (self.flat[1] - self.flat[0],)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the index stores it; optional fields only where they are set."""
        return {**self._required_json(), **self._optional_json()}

    def _optional_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.micro_batch is not None:
            found["micro_batch"] = self.micro_batch
        if self.call:
            found["call"] = self.call
        if self.token_dims is not None:
            found["token_dims"] = list(self.token_dims)
        if self.order is not None:
            found["order"] = self.order
        if self.flat is not None:
            found["flat"] = list(self.flat)
        if self.true_shape is not None:
            found["true_shape"] = list(self.true_shape)
        return found

    def _required_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "step": self.step,
            "state": self.state,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "map": [[[*span.local, *span.global_] for span in spans] for spans in self.map],
            "aliases": list(self.aliases),
            "source": self.source,
            "trainable": self.trainable,
            "replicated_over": list(self.replicated_over),
            "partial_over": list(self.partial_over),
            "partial_op": self.partial_op,
            "file": self.file,
            "key": self.key,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Read an entry and check that its map fits its shape.

        Raises:
            KeyError, TypeError, ValueError: The data is not an entry.
        """
        entry = cls(
            kind=text_of(data["kind"]),
            name=text_of(data["name"]),
            step=int(data["step"]),
            dtype=text_of(data["dtype"]),
            shape=tuple(int(size) for size in data["shape"]),
            map=tuple(
                tuple(Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in spans)
                for spans in data["map"]
            ),
            state=None if data["state"] is None else text_of(data["state"]),
            aliases=tuple(text_of(alias) for alias in data["aliases"]),
            source=None if data["source"] is None else text_of(data["source"]),
            trainable=bool(data["trainable"]),
            replicated_over=tuple(text_of(axis) for axis in data["replicated_over"]),
            partial_over=tuple(text_of(axis) for axis in data["partial_over"]),
            partial_op=text_of(data["partial_op"]),
            file=None if data["file"] is None else text_of(data["file"]),
            key=None if data["key"] is None else text_of(data["key"]),
            micro_batch=_optional_int(data.get("micro_batch")),
            call=int(data.get("call", 0)),
            token_dims=_optional_pair(data.get("token_dims")),
            order=_optional_int(data.get("order")),
            flat=_optional_pair(data.get("flat")),
            true_shape=None
            if data.get("true_shape") is None
            else tuple(int(size) for size in data["true_shape"]),
        )
        entry._check()
        return entry

    def _check(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"{self.kind} {self.name!r} has the unknown dtype {self.dtype!r}")
        if self.partial_op not in ("sum", "avg"):
            raise ValueError(f"{self.kind} {self.name!r} has partial_op={self.partial_op!r}")
        if (self.file is None) != (self.key is None):
            raise ValueError(f"{self.kind} {self.name!r} needs file and key, or neither")
        if len(self.map) != len(self.shape):
            raise ValueError(
                f"{self.kind} {self.name!r} maps {len(self.map)} dims of {len(self.shape)}"
            )
        self._check_optional()
        for dim, spans in enumerate(self.map):
            at = 0
            for (start, stop), (left, right) in spans:
                if start != at or stop <= start or right - left != stop - start:
                    raise ValueError(f"{self.kind} {self.name!r} has a broken map of dim {dim}")
                if left < 0 or right > self.shape[dim]:
                    raise ValueError(
                        f"{self.kind} {self.name!r} maps dim {dim} to {left}:{right}, outside of "
                        f"its global size {self.shape[dim]}"
                    )
                at = stop

    def _check_optional(self) -> None:
        if self.token_dims is not None and not all(
            0 <= dim < len(self.shape) for dim in self.token_dims
        ):
            raise ValueError(
                f"{self.kind} {self.name!r} has token_dims={list(self.token_dims)}, but "
                f"{len(self.shape)} dims"
            )
        if self.flat is not None:
            elements = math.prod(local_shape(self.map))
            if not 0 <= self.flat[0] <= self.flat[1] <= elements:
                raise ValueError(
                    f"{self.kind} {self.name!r} has flat={list(self.flat)} of {elements} elements"
                )
        if self.true_shape is not None and not (
            len(self.true_shape) == len(self.shape)
            and all(0 <= n <= size for n, size in zip(self.true_shape, self.shape, strict=True))
        ):
            raise ValueError(
                f"{self.kind} {self.name!r} has true_shape={list(self.true_shape)} of shape "
                f"{list(self.shape)}"
            )
        if min(self.micro_batch or 0, self.call, self.order or 0) < 0:
            raise ValueError(f"{self.kind} {self.name!r} has a negative count")


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _optional_pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    first, second = value
    return int(first), int(second)


def text_of(value: Any) -> str:
    """Return ``value``, which must be a string.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
