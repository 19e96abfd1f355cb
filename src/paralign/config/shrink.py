"""``--shrink``: a production config made laptop-sized, with what can go wrong in it kept.

Kept are every axis (as far as there are ranks), the schedule, uneven layer splits, dense layers
before those with experts, what is recomputed and computed in chunks, and every relation between
sizes, see :mod:`paralign.config.shrink_model`. Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paralign.config.keys import Section
from paralign.config.model_choice import ModelChoice, choose_model
from paralign.config.parse import show
from paralign.config.rules import find_problems, plan_of
from paralign.config.run import ModelSection, RunConfig
from paralign.config.shrink_mesh import lost_axes, small_meshes
from paralign.config.shrink_model import Split, small_sizes
from paralign.errors import ConfigError
from paralign.mesh import Degrees
from paralign.parallel.context_rules import inner_degree
from paralign.parallel.support import Plan
from paralign.parallel.support import problems as plan_problems

_MOST_STAGES = 4  # of a rank
_MOST_MICRO_BATCHES = 64
_SHORTEST = 16  # tokens of a row
_LAYER = re.compile(r"^[^.]+\.(\d+)(?=\.|$)")  # the first number in a name counts layers


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A small run, and what it has of the large one.

    Attributes:
        config: The small run.
        changes: Section -> key -> before and after.
        lost: What there were too few ranks for, in words.
    """

    config: RunConfig
    changes: Mapping[str, Mapping[str, tuple[Any, Any]]]
    lost: tuple[str, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield a section and ``key before -> after`` of all its changes; last, what was lost."""
        for section, keys in self.changes.items():
            parts = [f"{key} {show(old)} -> {show(new)}" for key, (old, new) in keys.items()]
            yield section, ", ".join(parts)
        for text in self.lost:
            yield "not kept", text


def shrink(config: RunConfig, world_size: int | None = None) -> Shrunk:
    """Return a laptop-sized copy of ``config``.

    Args:
        config: A run that keeps every static rule.
        world_size: Ranks of the copy; None: 8, or the next fewer that its mesh can have.

    Raises:
        ConfigError: There is no mesh of so many ranks with the same axes; or no copy was found
            that keeps every static rule.
    """
    first: list[str] = []
    for small in small_meshes(config, world_size):
        copy = _copy(config, small)
        found = find_problems(copy)
        if not found:
            lost = tuple(_losses(config, small))
            return Shrunk(config=copy, changes=_changes(config, copy), lost=lost)
        first = first or found
    raise ConfigError.from_problems("--shrink finds no smaller copy; the best one breaks", first)


def _copy(config: RunConfig, small: Degrees) -> RunConfig:
    large = config.mesh.degrees
    model = choose_model(config.model)
    context = _context(config, small)
    pipeline, num_layers = _pipeline(config, model, small)
    rows = config.batch.global_batch // (large.dp * config.pipeline.num_microbatches)
    seq_len, chunks = _sequence(config, small)
    global_batch = min(max(rows, 1), 2) * small.dp * pipeline["num_microbatches"]
    wrap = _wrap(config.fsdp.wrap, num_layers)
    changed: dict[str, Section] = {
        "model": _model(config, model, num_layers, large=large, small=small, context=context),
        "mesh": _with(config.mesh, **asdict(small)),
        "pipeline": _with(config.pipeline, **pipeline),
        "fsdp": _with(config.fsdp, wrap=wrap),
        "optimizer": _with(config.optimizer, freeze=_present(config.optimizer.freeze, num_layers)),
        "context": _with(config.context, **context),
        "batch": _with(config.batch, global_batch=global_batch, seq_len=seq_len),
        "loss": _with(config.loss, chunks=chunks),
        # A small vocabulary does not hold the tokens of a large tokenizer; bytes it does.
        "data": _with(config.data, tokenizer="bytes", end_token=None),
    }
    return config.model_copy(update=changed)


def _with(section: Section, **keys: Any) -> Section:
    return section.model_copy(update=keys)


def _context(config: RunConfig, small: Degrees) -> dict[str, Any]:
    """Keep how attention works over cp; a mix of both ways needs four ranks."""
    degree, balanced = config.context.ulysses_degree, config.context.load_balance
    if small.cp == 1 or small.cp == config.mesh.cp:
        # One rank has no ways; there load_balance asks for gathered keys and values.
        one = 1 if balanced else None
        return {"ulysses_degree": degree if small.cp > 1 or degree in (1, None) else one}
    if degree in (1, None):
        return {}
    if degree == config.mesh.cp:
        return {"ulysses_degree": small.cp}
    inner = next((d for d in range(2, small.cp) if small.cp % d == 0), 1 if balanced else small.cp)
    return {"ulysses_degree": inner}


def _pipeline(
    config: RunConfig, model: ModelChoice, small: Degrees
) -> tuple[dict[str, Any], int | None]:
    """Return the changed keys of the pipeline, and the number of layers where it is known."""
    large = plan_of(config, model)
    changes: dict[str, Any] = {}
    if large.stages_per_rank is not None:
        changes["stages_per_rank"] = min(large.stages_per_rank, _MOST_STAGES)
    per_rank = min(large.num_stages_per_rank, _MOST_STAGES)
    num_stages = small.pp * per_rank
    num_layers = None
    if large.num_layers is not None:
        num_layers = _num_layers(large, num_stages, model)
        if large.layers_per_stage is not None:
            listed = _listed(large.layers_per_stage, num_stages)
            changes["layers_per_stage"], num_layers = listed, sum(listed)
    elif small.pp != large.pp:
        changes["layers_per_stage"] = None
    update = {"pp": small.pp, "num_layers": num_layers, **changes}
    plan = Plan(**{**vars(large), **update})
    changes["num_microbatches"] = _num_microbatches(large, plan)
    return changes, num_layers


def _num_layers(large: Plan, num_stages: int, model: ModelChoice) -> int:
    """Return few layers that leave as uneven a split, dense ones and ones with experts among them.

    A stage keeps more than one layer where it has more than one.
    """
    assert large.num_layers is not None
    per_stage, uneven = divmod(large.num_layers, large.num_stages)
    dense = model.size("num_dense_layers") or 0
    least = min(large.num_layers, 2 + min(dense, 1))
    number = min(2, per_stage) * num_stages + (1 if uneven and num_stages > 1 else 0)
    while number < least:
        number += num_stages
    return min(number, large.num_layers)


def _listed(layers: tuple[int, ...] | Any, num_stages: int) -> tuple[int, ...]:
    """Take stages from all over the list, and leave their differences."""
    last = max(1, num_stages - 1)
    chosen = [layers[place * (len(layers) - 1) // last] for place in range(num_stages)]
    small = [1 + min(2, number - min(layers)) for number in chosen]
    if len(set(layers)) > 1 and len(set(small)) == 1:
        small[0] += 1
    if min(layers) > 1:
        small = [number + 1 for number in small]
    return tuple(small)


def _num_microbatches(large: Plan, small: Plan) -> int:
    """Return the fewest that fill, or do not fill, the pipeline as before."""

    def kinds(plan: Plan) -> tuple[bool, ...]:
        m, pp = plan.num_microbatches, plan.pp
        deep = (m > pp, m == pp, m >= 2 * pp, m % pp == 0)
        return (m > 1, *(deep if small.pp > 1 else ()))

    for number in range(1, _MOST_MICRO_BATCHES):
        plan = Plan(**{**vars(small), "num_microbatches": number})
        if kinds(plan) == kinds(large) and not plan_problems(plan):
            return number
    return min(large.num_microbatches, 2 * small.pp)


def _sequence(config: RunConfig, small: Degrees) -> tuple[int, int]:
    """Return the length of a row and the chunks of its loss, which divide or do not as before."""
    seq_len, chunks = config.batch.seq_len, config.loss.chunks
    streams = config.tensor.sequence_parallel
    parts = config.mesh.cp * (config.mesh.tp if streams else 1)
    few = small.cp * (small.tp if streams else 1)
    # Experts are sent tokens of all ranks of tp, also where these share no sequence.
    share = math.lcm(small.cp * small.tp, small.cp * (2 if config.context.load_balance else 1))
    divides = seq_len // parts % chunks == 0
    for length in range(share, seq_len + 1, share):
        for number in (1,) if chunks == 1 else range(2, min(chunks, 3) + 1):
            fits = number <= length // few and (length // few % number == 0) == divides
            if length >= min(_SHORTEST, seq_len) and fits:
                return length, number
    return seq_len, chunks


def _wrap(wrap: Any, num_layers: int | None) -> Any:
    """Leave modules of layers that are gone out of the units."""
    if isinstance(wrap, str) or num_layers is None:
        return wrap
    units = [_present(unit, num_layers) for unit in wrap]
    return tuple(unit for unit in units if unit) or "blocks"


def _present(names: Sequence[str], num_layers: int | None) -> tuple[str, ...]:
    """Leave out names, or patterns of names, in layers that are gone."""
    found = [(name, _LAYER.match(name)) for name in names]
    return tuple(
        name
        for name, layer in found
        if layer is None or num_layers is None or int(layer[1]) < num_layers
    )


def _model(
    config: RunConfig,
    model: ModelChoice,
    num_layers: int | None,
    *,
    large: Degrees,
    small: Degrees,
    context: dict[str, Any],
) -> ModelSection:
    changed: dict[str, Any] = {}
    if num_layers is not None:
        changed["num_layers"] = num_layers
    if model.config is not None:
        before, after = config.context, config.context.model_copy(update=context)
        changed |= small_sizes(
            model.config,
            Split(degrees=large, inner=inner_degree(large.cp, before.ulysses_degree)),
            Split(degrees=small, inner=inner_degree(small.cp, after.ulysses_degree)),
        )
        dense = model.config.num_dense_layers
        if dense and num_layers is not None:
            all_dense = dense >= model.config.num_layers
            changed["num_dense_layers"] = num_layers if all_dense else 1
        now = asdict(model.config)
        changed = {key: value for key, value in changed.items() if now[key] != value}
    sections = {**config.model.model_dump(), **changed, "start_from": None}
    return ModelSection.model_validate(sections)


def _losses(config: RunConfig, small: Degrees) -> Iterator[str]:
    large = config.mesh.degrees
    for axis in lost_axes(large, small):
        yield (
            f"axis {axis} ({getattr(large, axis)} ranks): {small.world_size} ranks have no room "
            "for it beside the others. Give more with --world."
        )
    if (large.ep > large.tp) and 1 < small.ep <= small.tp:
        yield (
            f"ep={small.ep} stays within tp={small.tp}, where ep={large.ep} reaches over the "
            "other axes too. Give more ranks with --world, or fewer axes."
        )
    degree = config.context.ulysses_degree
    if degree is not None and 1 < degree < large.cp and small.cp in (2, 3):
        yield (
            f"ulysses_degree={degree} of cp={large.cp}, which swaps heads and gathers keys and "
            f"values: cp={small.cp} can do one of the two. Give more ranks with --world."
        )
    if config.model.start_from is not None:
        yield (
            f"model.start_from={config.model.start_from!r}: its weights are of the large sizes. "
            "The small copy starts from random ones."
        )
    if config.model.name is None:
        yield (
            "sizes of your own model, apart from num_layers: paralign does not know what they "
            "mean. Change them with --set model.KEY=VALUE."
        )


def _changes(before: RunConfig, after: RunConfig) -> dict[str, dict[str, tuple[Any, Any]]]:
    changes: dict[str, dict[str, tuple[Any, Any]]] = {}
    for section in RunConfig.model_fields:
        old, new = _values(before, section), _values(after, section)
        differing = {key: (old[key], new[key]) for key in new if old.get(key) != new[key]}
        if differing:
            changes[section] = differing
    return changes


def _values(config: RunConfig, section: str) -> dict[str, Any]:
    value = getattr(config, section)
    if not isinstance(value, Section):
        return {section: value}
    if isinstance(value, ModelSection):
        model = choose_model(value)
        return dict(model.known) if model.config is None else asdict(model.config)
    return dict(value)
