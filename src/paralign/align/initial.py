"""Start a run from the initial weights of another one, whatever either run's mesh is.

Two runs can only be compared from equal weights. Names and places are found as recording finds
them, so a model that can be recorded can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.align.held import HeldParameters
from paralign.align.name_rules import NameRule
from paralign.align.names import NamedParameter, named_buffers
from paralign.align.shard_rules import LayoutRule, ShardRule
from paralign.align.weights import Weights, whole_box
from paralign.errors import ConfigError
from paralign.layout import Box

PART_ELEMENTS = 1 << 24
"""Elements read at once."""


def fill_initial(
    model: nn.Module | Sequence[nn.Module],
    opened: Callable[[], Weights],
    *,
    mesh: Any = None,
    names: NameRule = None,
    shards: ShardRule | None = None,
    layouts: LayoutRule | None = None,
    alone: bool = False,
) -> list[str]:
    """Fill the parameters of ``model``, and those buffers that are among the weights.

    Arguments, communication and errors are those of :func:`paralign.load_initial`.

    Args:
        model: The model, or the stage modules this rank holds; wrapped and sharded as it will run.
        opened: Opens what to fill it with. Called after ranks have met, so that what another one
            has written before is there.
        mesh: As in :func:`paralign.align.record.record`; so are ``names``, ``shards`` and
            ``layouts``.
        names: Names of the model -> names among the weights.
        shards: What plain tensors are cut over.
        layouts: The same in full.
        alone: This process loads by itself although it belongs to a process group.

    Returns:
        Names among the weights that this rank has not used.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    in_group = dist.is_available() and dist.is_initialized() and not alone
    world_size = dist.get_world_size() if in_group else 1
    held = HeldParameters.of(
        modules,
        mesh=mesh,
        names=names,
        shards=shards,
        layouts=layouts,
        source="auto",
        world_size=world_size,
    )
    held.agree(world_size, dist.get_rank() if in_group else 0)
    weights = opened()
    try:
        return _fill(modules, held, weights)
    finally:
        weights.close()


def _fill(modules: Sequence[nn.Module], held: HeldParameters, weights: Weights) -> list[str]:
    parameters = {n for p in held.pieces.parameters for n in (p.name, *p.aliases)}
    weights = weights.choose(parameters)
    problems: list[str] = []
    views, used = _parameter_views(held, weights, problems)
    for name, buffer in named_buffers(modules, held.name_rules):
        if name not in weights.shapes or name in parameters:
            continue
        used.add(name)
        _check_shape(name, tuple(buffer.shape), weights, problems)
        views.append((name, buffer, whole_box(buffer.shape)))
    if problems:
        raise ConfigError.from_problems(f"cannot load {weights.where!r} into the model", problems)
    _copy(views, weights)
    return sorted(set(weights.shapes) - used)


_Views = list[tuple[str, Tensor, Box]]
"""Name of a tensor, the memory to fill, and which part of the tensor it holds."""


def _parameter_views(
    held: HeldParameters, weights: Weights, problems: list[str]
) -> tuple[_Views, set[str]]:
    """Return where parameters are to be filled, and the names that were used; note problems."""
    used: set[str] = set()
    views: _Views = []
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
            if not _check_shape(name, piece.shape, weights, problems, called=named.name):
                break
            views += [(name, view, box) for view, box in piece.views()]
    return views, used


def _check_shape(
    name: str,
    shape: tuple[int, ...],
    weights: Weights,
    problems: list[str],
    *,
    called: str | None = None,
) -> bool:
    there = weights.shapes[name]
    if shape == there:
        return True
    problems.append(
        f"{called or name!r} has the shape {list(shape)} in the model, but {list(there)} there"
    )
    return False


def _copy(views: _Views, weights: Weights) -> None:
    with torch.no_grad():
        for name, view, box in views:
            for part in box.split(PART_ELEMENTS):
                target = view
                offsets = zip(part.start, box.start, part.shape, strict=True)
                for dim, (first, start, size) in enumerate(offsets):
                    target = target.narrow(dim, first - start, size)
                target.copy_(weights.read(name, part))


def _similar(named: NamedParameter, weights: Weights) -> str:
    """Return a hint at a name that ends alike: a prefix is the most common difference."""
    last = named.name.rpartition(".")[2]
    tails = [n for n in weights.shapes if n.endswith(named.name) or named.name.endswith(n)]
    near = tails or [n for n in weights.shapes if n.rpartition(".")[2] == last]
    return f". Say names=, it has {near[0]!r}" if near else ""
