"""Writes a config as commented YAML: every section and every key with what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from paralign.config.keys import Section
from paralign.config.run import ModelSection, RunConfig

_VALUE_COLUMN = 36
_LINE_WIDTH = 100


def render(config: RunConfig, *, title: str) -> str:
    """Return a RUN.yaml that reads back as ``config``, each key explained.

    Keys that cannot stand beside the ones in use (your own model beside a named one) are there as
    comments.

    Args:
        config: The run to write.
        title: First line, a comment.
    """
    lines = [
        f"# {title}",
        "# `paralign check` shows its plan, `paralign align` judges it against one device.",
    ]
    for name, field in RunConfig.model_fields.items():
        value = getattr(config, name)
        lines.append("")
        if not isinstance(value, Section):
            lines.extend(_lines(f"{name}: {_scalar(value)}", field.description))
            continue
        lines.append(f"# {(type(value).__doc__ or '').splitlines()[0]}")
        lines.append(f"{name}:")
        lines.extend(_section(value))
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(section, ModelSection) and value is None:
            extra = field.json_schema_extra
            assert isinstance(extra, dict)  # every key is declared with its example
            yield from _lines(f"  # {key}: {extra['example']}", field.description)
        else:
            yield from _lines(f"  {key}: {_scalar(value)}", field.description)
    if isinstance(section, ModelSection):
        for key, value in section.hyper_parameters.items():
            yield from _lines(f"  {key}: {_scalar(value)}", "a hyper-parameter of the model")
        if not section.hyper_parameters:
            meaning = "and any other hyper-parameter of the model, by its name"
            yield from _lines("  # num_layers: 8", meaning)


def _lines(text: str, meaning: str | None) -> Iterator[str]:
    """Put ``meaning`` beside ``text``, and below itself where it is long."""
    width = _LINE_WIDTH - _VALUE_COLUMN - len("# ")
    first, *rest = textwrap.wrap(meaning or "", width)
    line = f"{text.ljust(_VALUE_COLUMN - 2)}  # {first}"
    if len(line) > _LINE_WIDTH:
        line, rest = text, [first, *rest]
    yield line
    yield from (f"{' ' * _VALUE_COLUMN}# {line}" for line in rest)


def _scalar(value: Any) -> str:
    """Return ``value`` on one line, as YAML reads it back."""
    if isinstance(value, float):
        # YAML 1.1 readers take 1e-08 for text: give the mantissa a dot.
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
