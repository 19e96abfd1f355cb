"""Turns a raw mapping into a ``RunConfig``, and everything wrong with its keys into sentences.

A key with a wrong value is named and dropped, and the rest is still read: the rules can look at
everything that is sound, and a user sees all mistakes at once.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paralign.config.keys import Section
from paralign.config.nearest import nearest
from paralign.config.run import RunConfig
from paralign.config.source import describe_type

SECTIONS: Mapping[str, type[Section]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What could be read: ``config`` holds the default wherever a key is in ``unsound``."""

    config: RunConfig
    problems: tuple[str, ...]
    unsound: frozenset[str]  # dotted paths; a whole section by its own name


def parse(raw: Mapping[str, Any]) -> Parsed:
    """Read ``raw`` as far as it is sound, and say what is wrong with the rest."""
    values = {key: value for key, value in raw.items() if not (key in SECTIONS and value is None)}
    problems: list[str] = []
    unsound: set[str] = set()
    while True:
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            paths = {_path_of(detail["loc"]): None for detail in error.errors(include_url=False)}
        else:
            break
        for path in paths:
            problems.append(_explain(path, values))
            values = _without(values, path)
            unsound.add(path)
    return Parsed(config=config, problems=tuple(problems), unsound=frozenset(unsound))


def show(value: Any) -> str:
    """Return ``value`` as it reads in YAML, shortened where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 60
    return brief.repr(list(value) if isinstance(value, tuple) else value)


def explain_unknown(section: str, key: str) -> str:
    """Say that ``section`` has no ``key``, and which key was probably meant."""
    path = f"{section}.{key}" if section else key
    elsewhere = [name for name, kind in SECTIONS.items() if key in kind.model_fields]
    known = list(SECTIONS[section].model_fields if section else RunConfig.model_fields)
    if near := nearest(key, known):
        return f"{path}: there is no such key. Did you mean {f'{section}.' * bool(section)}{near}?"
    if elsewhere:
        return f"{path}: there is no such key. Did you mean {elsewhere[0]}.{key}?"
    place = f"{section} has" if section else "a RUN.yaml has"
    return (
        f"{path}: there is no such key; {place} {', '.join(known)}. Remove it or use one of these."
    )


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)  # every key is declared with `_key`
    return extra


def _path_of(location: tuple[str | int, ...]) -> str:
    """Keep section and key; what follows is an index or one branch of a union."""
    depth = 2 if location[0] in SECTIONS else 1
    return ".".join(str(part) for part in location[:depth])


def _without(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    section, _, key = path.partition(".")
    rest = {name: value for name, value in values.items() if name != section}
    if key:
        rest[section] = {name: v for name, v in values[section].items() if name != key}
    return rest


def _explain(path: str, values: Mapping[str, Any]) -> str:
    section, _, key = path.partition(".")
    if not key and section in SECTIONS:
        key, field = next(iter(SECTIONS[section].model_fields.items()))
        value = values[section]
        return (
            f"{section}={show(value)} ({describe_type(value)}) must be a section. "
            f"Write its keys below it, such as `{section}: {{{key}: {_extra(field)['example']}}}`."
        )
    fields = SECTIONS[section].model_fields if key else RunConfig.model_fields
    name = key or section
    if name not in fields:
        return explain_unknown(section if key else "", name)
    value = values[section][key] if key else values[section]
    return explain_value(path, value, fields[name])


def explain_value(path: str, value: Any, field: FieldInfo) -> str:
    """Say what ``path`` must be instead of ``value``, and give a value that works."""
    extra = _extra(field)
    expects, key = str(extra["expects"]), path.rpartition(".")[2]
    kind = "" if type(value) in (int, float) else f" ({describe_type(value)})"
    text = f"{path}={show(value)}{kind} must be {expects}."
    words = str(extra["words"]).split(", ")
    near = nearest(value, words, cutoff=0.5) if isinstance(value, str) else None
    return f"{text} Did you mean {near}?" if near else f"{text} Write `{key}: {extra['example']}`."
