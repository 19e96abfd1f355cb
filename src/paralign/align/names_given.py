"""Apply the user's ``names=`` of a comparison to a trace."""

from __future__ import annotations

from paralign.align.fused import rows_of_part
from paralign.align.lens import Lens, position, row_major
from paralign.align.name_rules import NameRule, NameRules, NewName
from paralign.align.places import RULE, Pairing, Place, own_name
from paralign.align.regions import as_map, global_shape, held_parts
from paralign.align.trace import TOKEN_KINDS, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError
from paralign.layout import Box, Span, boxes


def given_places(reader: TraceReader, names: NameRule, pairing: Pairing) -> None:
    """Give every parameter that the rule renames its new name, or names.

    Args:
        reader: The run whose names the rule knows.
        names: Recorded name or pattern -> the reference's, or ``Fused``; or a function.
        pairing: Takes the places.

    Raises:
        ConfigError: A pattern matches nothing, or a new name cannot be applied; all are listed.
    """
    if names is None:
        return
    rules = NameRules(names)
    problems: dict[str, None] = {}
    for index in reader.ranks:
        for entry in index.tensors:
            key = (index.rank, own_name(entry))
            if entry.kind in TOKEN_KINDS or key in pairing.found or not entry.shape:
                continue
            try:
                new = rules.of(entry.name)
                places = None if new == [NewName(entry.name)] else _places(entry, new)
            except ConfigError as error:
                problems[str(error)] = None
                continue
            if places is not None:
                pairing.found[key] = tuple(places)
                pairing.paired_by.update((place.name, RULE) for place in places)
    for pattern in rules.unused():
        problems[f"names[{pattern!r}] matches no parameter of {reader.directory}"] = None
    if problems:
        raise ConfigError.from_problems("cannot apply names", list(problems))


def _places(entry: TensorEntry, new: list[NewName]) -> list[Place]:
    places: list[Place] = []
    for target in new:
        if target.part is None:
            shape = global_shape(entry)
            places += [Place(target.name, shape, held, lens) for held, lens in held_parts(entry)]
        else:
            places += _part_places(entry, target)
    return places


def _part_places(entry: TensorEntry, target: NewName) -> list[Place]:
    """Return what a fused tensor holds of one of its parts."""
    part = target.part
    assert part is not None
    dim = part.rule.dim % len(entry.shape)
    if entry.flat is not None:
        raise ConfigError(
            f"names[{entry.name!r}]: it is recorded as ranges of elements, which cannot be divided "
            "into fused parts. Give names= to pa.record instead."
        )
    rows = rows_of_part(entry.map[dim], entry.shape[dim], part, entry.name)
    shape = (*entry.shape[:dim], rows.size, *entry.shape[dim + 1 :])
    places = []
    for take, span in zip(rows.take, rows.spans, strict=True):
        held = (*entry.map[:dim], (Span(take, span.global_),), *entry.map[dim + 1 :])
        for box in boxes(held):
            lens = Lens(position(box.local, entry.held_shape), row_major(entry.held_shape))
            places.append(Place(target.name, shape, as_map(Box((), box.start, box.shape)), lens))
    return places
