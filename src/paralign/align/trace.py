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

from paralign.align.tensor_entry import DTYPE_CODES as DTYPE_CODES
from paralign.align.tensor_entry import TOKEN_KINDS as TOKEN_KINDS
from paralign.align.tensor_entry import Kind as Kind
from paralign.align.tensor_entry import TensorEntry as TensorEntry
from paralign.align.tensor_entry import text_of

FORMAT = "paralign-trace"
VERSION = 1
FACTS = "facts.json"


def rank_stem(rank: int) -> str:
    """Return the common beginning of a rank's file names: ``rank00003``."""
    return f"rank{rank:05d}"


@dataclass(frozen=True)
class TokenMap:
    """Which tokens of the global batch a rank's micro-batch holds, where the run has said so.

    Without it they are found by content, in the recorded tokens.
    """

    step: int
    micro_batch: int
    samples: tuple[int, ...] | None = None
    """Of every local row the number of its sample in the global batch; -1: padding."""
    positions: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Of every local row the intervals of global positions that it holds, in local order; -1:-1 +
    length is padding. One row stands for all."""

    def to_json(self) -> dict[str, Any]:
        """Return the map as the index stores it."""
        return {
            "step": self.step,
            "micro_batch": self.micro_batch,
            "samples": None if self.samples is None else list(self.samples),
            "positions": None
            if self.positions is None
            else [[list(interval) for interval in row] for row in self.positions],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenMap:
        """Read a token map.

        Raises:
            KeyError, TypeError, ValueError: The data is not a token map.
        """
        samples, positions = data["samples"], data["positions"]
        return cls(
            step=int(data["step"]),
            micro_batch=int(data["micro_batch"]),
            samples=None if samples is None else tuple(int(sample) for sample in samples),
            positions=None
            if positions is None
            else tuple(tuple((int(a), int(b)) for a, b in row) for row in positions),
        )


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
            replicated_over=tuple(text_of(axis) for axis in data["replicated_over"]),
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
    token_maps: list[TokenMap] = field(default_factory=list)
    unseen: list[dict[str, str]] = field(default_factory=list)
    """Name and reason of module outputs that cannot be seen; unlike ``not_recorded`` it does not
    stand against ``aligned``, because parameters' gradients show what they would."""
    run: dict[str, Any] = field(default_factory=dict)
    """What this rank said of the run; ``Facts.run`` is what rank 0 said."""

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
            "token_maps": [tokens.to_json() for tokens in self.token_maps],
            "unseen": self.unseen,
            "run": self.run,
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
            trace_id=text_of(data["trace_id"]),
            coordinates={text_of(axis): int(at) for axis, at in data["coordinates"].items()},
            axes={text_of(a): [int(rank) for rank in ranks] for a, ranks in data["axes"].items()},
            stages=None if data["stages"] is None else [int(stage) for stage in data["stages"]],
            steps=[int(step) for step in data["steps"]],
            optimizers=list(data["optimizers"]),
            modules=dict(data["modules"]),
            tensors=[TensorEntry.from_json(entry) for entry in data["tensors"]],
            scalars=[ScalarEntry.from_json(entry) for entry in data["scalars"]],
            not_recorded=[
                {"name": text_of(item["name"]), "why": text_of(item["why"])}
                for item in data["not_recorded"]
            ],
            files={text_of(name): int(size) for name, size in data["files"].items()},
            token_maps=[TokenMap.from_json(item) for item in data.get("token_maps", [])],
            unseen=[
                {"name": text_of(item["name"]), "why": text_of(item["why"])}
                for item in data.get("unseen", [])
            ],
            run=dict(data.get("run", {})),
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
            trace_id=text_of(data["trace_id"]),
            world_size=int(data["world_size"]),
            steps=[int(step) for step in data["steps"]],
            what=[text_of(what) for what in data["what"]],
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
