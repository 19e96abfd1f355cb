"""What a trace folder contains, as values: tensors, scalars, an index per rank, and facts.

docs/trace.md describes the format and ``schema/trace.schema.json`` checks it, so that others can
write it.
Nothing here touches files or torch: see ``trace_writer`` and ``trace_reader``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paralign.layout import LocalMap, Span

FORMAT = "paralign-trace"
VERSION = 1
FACTS = "facts.json"

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

    PARAM = "param"  # before the first recorded step
    GRAD = "grad"  # as the optimizer is about to use them, before clipping
    MOMENT = "moment"  # one state of the optimizer after the step, named by ``state``
    PARAM_AFTER = "param_after"  # after the optimizer has stepped


def rank_stem(rank: int) -> str:
    """Return the common beginning of a rank's file names: ``rank00003``."""
    return f"rank{rank:05d}"


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

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the index stores it."""
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
            kind=_text(data["kind"]),
            name=_text(data["name"]),
            step=int(data["step"]),
            dtype=_text(data["dtype"]),
            shape=tuple(int(size) for size in data["shape"]),
            map=tuple(
                tuple(Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in spans)
                for spans in data["map"]
            ),
            state=None if data["state"] is None else _text(data["state"]),
            aliases=tuple(_text(alias) for alias in data["aliases"]),
            source=None if data["source"] is None else _text(data["source"]),
            trainable=bool(data["trainable"]),
            replicated_over=tuple(_text(axis) for axis in data["replicated_over"]),
            partial_over=tuple(_text(axis) for axis in data["partial_over"]),
            partial_op=_text(data["partial_op"]),
            file=None if data["file"] is None else _text(data["file"]),
            key=None if data["key"] is None else _text(data["key"]),
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


@dataclass(frozen=True)
class ScalarEntry:
    """One number a rank reported: a loss with its tokens, or a gradient norm."""

    kind: str
    step: int
    value: float
    tokens: int | None = None
    reduction: str = "mean"
    """Of a loss: ``mean`` over its tokens, or their ``sum``."""
    scope: str = "global"
    """``global``: the number of the whole step. ``local``: this rank's part of it."""
    replicated_over: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the index stores it."""
        return {
            "kind": self.kind,
            "step": self.step,
            "value": encode_float(self.value),
            "tokens": self.tokens,
            "reduction": self.reduction,
            "scope": self.scope,
            "replicated_over": list(self.replicated_over),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScalarEntry:
        """Read an entry.

        Raises:
            KeyError, TypeError, ValueError: The data is not an entry.
        """
        if data["kind"] not in ("loss", "norm"):
            raise ValueError(f"scalar kind {data['kind']!r} is neither loss nor norm")
        if data["reduction"] not in ("mean", "sum") or data["scope"] not in ("global", "local"):
            raise ValueError(
                f"scalar with reduction={data['reduction']!r}, scope={data['scope']!r}"
            )
        return cls(
            kind=data["kind"],
            step=int(data["step"]),
            value=decode_float(data["value"]),
            tokens=None if data["tokens"] is None else int(data["tokens"]),
            reduction=data["reduction"],
            scope=data["scope"],
            replicated_over=tuple(_text(axis) for axis in data["replicated_over"]),
        )


@dataclass
class RankIndex:
    """Everything one rank says about what it recorded."""

    rank: int
    world_size: int
    trace_id: str
    coordinates: dict[str, int] = field(default_factory=dict)
    axes: dict[str, list[int]] = field(default_factory=dict)
    """Per axis the global ranks of this rank's group, in the order of their coordinate."""
    stages: list[int] | None = None
    steps: list[int] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per parameter the module that owns it: its name, class, and where that is defined."""
    tensors: list[TensorEntry] = field(default_factory=list)
    scalars: list[ScalarEntry] = field(default_factory=list)
    not_recorded: list[dict[str, str]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    """Payload files and their sizes in bytes."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``rankNNNNN.json``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "trace_id": self.trace_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "coordinates": self.coordinates,
            "axes": self.axes,
            "stages": self.stages,
            "steps": self.steps,
            "optimizers": self.optimizers,
            "modules": self.modules,
            "tensors": [entry.to_json() for entry in self.tensors],
            "scalars": [entry.to_json() for entry in self.scalars],
            "not_recorded": self.not_recorded,
            "files": self.files,
            "complete": True,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankIndex:
        """Read the content of ``rankNNNNN.json``.

        Raises:
            KeyError, TypeError, ValueError: The data is not an index.
        """
        if data["complete"] is not True:
            raise ValueError("it is not complete")
        return cls(
            rank=int(data["rank"]),
            world_size=int(data["world_size"]),
            trace_id=_text(data["trace_id"]),
            coordinates={_text(axis): int(at) for axis, at in data["coordinates"].items()},
            axes={_text(a): [int(rank) for rank in ranks] for a, ranks in data["axes"].items()},
            stages=None if data["stages"] is None else [int(stage) for stage in data["stages"]],
            steps=[int(step) for step in data["steps"]],
            optimizers=list(data["optimizers"]),
            modules=dict(data["modules"]),
            tensors=[TensorEntry.from_json(entry) for entry in data["tensors"]],
            scalars=[ScalarEntry.from_json(entry) for entry in data["scalars"]],
            not_recorded=[
                {"name": _text(item["name"]), "why": _text(item["why"])}
                for item in data["not_recorded"]
            ],
            files={_text(name): int(size) for name, size in data["files"].items()},
        )


@dataclass
class Facts:
    """What is true of the run as a whole; written last, by rank 0."""

    trace_id: str
    world_size: int
    steps: list[int]
    what: list[str]
    versions: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """What the user or the runner said: batch, sequence length, compute dtype, clip, ..."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``facts.json``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "trace_id": self.trace_id,
            "world_size": self.world_size,
            "steps": self.steps,
            "what": self.what,
            "versions": self.versions,
            "run": self.run,
            "complete": True,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """Read the content of ``facts.json``.

        Raises:
            KeyError, TypeError, ValueError: The data is not facts.
        """
        if data["complete"] is not True:
            raise ValueError("it is not complete")
        return cls(
            trace_id=_text(data["trace_id"]),
            world_size=int(data["world_size"]),
            steps=[int(step) for step in data["steps"]],
            what=[_text(what) for what in data["what"]],
            versions=dict(data["versions"]),
            run=dict(data["run"]),
        )


def encode_float(value: float) -> float | str:
    """Return ``value``, or its name where JSON has no number for it."""
    return value if math.isfinite(value) else str(value)


def decode_float(value: Any) -> float:
    """Undo :func:`encode_float`.

    Raises:
        ValueError: It is neither a number nor one of the three names.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
