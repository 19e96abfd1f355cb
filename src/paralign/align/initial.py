"""Start a run from the initial weights of another one, whatever either run's mesh is.

Two runs can only be compared from equal weights. Names and places are found as recording finds
them, so a model that can be recorded can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paralign.align.held import HeldParameters
from paralign.align.name_rules import NameRule
from paralign.align.names import NamedParameter
from paralign.align.pair import Moment, Quantity, Side
from paralign.align.shard_rules import LayoutRule, ShardRule
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError, TraceError
from paralign.layout import Box

PART_ELEMENTS = 1 << 24
"""Elements read at once."""


def load_initial(
    model: nn.Module | Sequence[nn.Module],
    source: str | Path,
    *,
    mesh: Any = None,
    names: NameRule = None,
    shards: ShardRule | None = None,
    layouts: LayoutRule | None = None,
    alone: bool = False,
) -> list[str]:
    """Fill the parameters of ``model`` with the initial weights of a recorded run, or of a file.

    Every rank reads only what it holds. Values are converted to the parameters' dtype. Buffers stay
    as they are.

    Args:
        model: The model, or the stage modules this rank holds; wrapped and sharded as it will run.
        source: A trace folder with recorded ``params``, or a ``.safetensors`` file of whole tensors
            by global name.
        mesh: As in :func:`paralign.align.record.record`; so are ``names``, ``shards`` and
            ``layouts``.
        names: Parameter names of the model -> names in ``source``.
        shards: What plain tensors are cut over.
        layouts: The same in full.
        alone: This process loads by itself although it belongs to a process group.

    Returns:
        Names in ``source`` that this rank has not used: those of other stages, or a mistake.

    Comm:
        One all-gather of a small object over the default process group, unless ``alone``.

    Raises:
        ConfigError: A parameter is not in ``source`` or has another shape there; all problems are
            listed and nothing is loaded. Or the parameters are kept by DeepSpeed's ZeRO-3.
        TraceError: ``source`` is neither a trace nor a safetensors file.
    """
    in_group = dist.is_available() and dist.is_initialized() and not alone
    world_size = dist.get_world_size() if in_group else 1
    held = HeldParameters.of(
        [model] if isinstance(model, nn.Module) else list(model),
        mesh=mesh,
        names=names,
        shards=shards,
        layouts=layouts,
        source="auto",
        world_size=world_size,
    )
    held.agree(world_size, dist.get_rank() if in_group else 0)
    path = Path(source)
    weights = _FileWeights(path) if path.is_file() else _TraceWeights(path)
    try:
        return _load(held, weights, path)
    finally:
        weights.close()


def _load(held: HeldParameters, weights: _FileWeights | _TraceWeights, path: Path) -> list[str]:
    used: set[str] = set()
    problems = []
    views: list[tuple[str, Tensor, Box]] = []
    for named in held.pieces.parameters:
        if hasattr(named.parameter, "ds_id"):
            problems.append(f"{named.name!r} is kept by ZeRO-3: load before deepspeed.initialize")
            continue
        name = next((n for n in (named.name, *named.aliases) if n in weights.shapes), None)
        if name is None:
            problems.append(f"{named.name!r} is not in it{_similar(named, weights)}")
            continue
        used.update(n for n in (named.name, *named.aliases) if n in weights.shapes)
        for piece in held.pieces.layouts.place(named, named.parameter):
            if piece.shape != weights.shapes[name]:
                problems.append(
                    f"{named.name!r} has the shape {list(piece.shape)} in the model, but "
                    f"{list(weights.shapes[name])} there"
                )
                break
            views += [(name, view, box) for view, box in piece.views()]
    if problems:
        raise ConfigError.from_problems(f"cannot load {str(path)!r} into the model", problems)
    with torch.no_grad():
        for name, view, box in views:
            for part in box.split(PART_ELEMENTS):
                target = view
                offsets = zip(part.start, box.start, part.shape, strict=True)
                for dim, (first, start, size) in enumerate(offsets):
                    target = target.narrow(dim, first - start, size)
                target.copy_(weights.read(name, part))
    return sorted(set(weights.shapes) - used)


def _similar(named: NamedParameter, weights: _FileWeights | _TraceWeights) -> str:
    """Return a hint at a name that ends alike: a prefix is the most common difference."""
    last = named.name.rpartition(".")[2]
    tails = [n for n in weights.shapes if n.endswith(named.name) or named.name.endswith(n)]
    near = tails or [n for n in weights.shapes if n.rpartition(".")[2] == last]
    return f". Say names=, it has {near[0]!r}" if near else ""


class _TraceWeights:
    """The parameters of a trace before its first step."""

    def __init__(self, path: Path) -> None:
        self._reader = TraceReader(path)
        side = Side(self._reader)
        moments = [moment for moment in side.moments() if moment.kind == Kind.PARAM]
        if not moments:
            raise TraceError(f"{path}: it has no initial parameters. Record it with 'params'.")
        self._quantities: dict[str, Quantity] = {}
        problems = []
        for name in side.names(Moment.of(moments[0].step, Kind.PARAM)):
            quantity = side.quantity(moments[0], name)
            assert quantity is not None, "a listed name has a quantity"
            self._quantities[name] = quantity
            problems += [f"{name!r}: {problem}" for problem in quantity.problems]
        if problems:
            raise ConfigError.from_problems(f"{path} does not hold whole tensors", problems)
        self.shapes = {name: tuple(q.shape) for name, q in self._quantities.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, in fp64."""
        return self._quantities[name].fetch(box)

    def close(self) -> None:
        """Unmap the payloads."""
        self._reader.close()


class _FileWeights:
    """Whole tensors in a safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
            names = list(self._file.keys())
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise TraceError(
                f"{path}: not a safetensors file ({error}). Save the weights with "
                "safetensors.torch.save_file, or give a trace folder."
            ) from error

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor."""
        part: Tensor
        if math.prod(box.shape) == math.prod(self.shapes[name]):
            part = self._file.get_tensor(name)
        else:
            slices = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            part = self._file.get_slice(name)[slices]
        return part

    def close(self) -> None:
        """Nothing to do: the file is unmapped with its last tensor."""
