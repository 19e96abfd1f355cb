"""Reads YAML text safely: duplicate keys are refused and every complaint names its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from paralign.errors import ConfigError

# YAML 1.1 takes 3e-4 for text because it has no dot; everyone who writes it means a number.
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *other`, which super() expands
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _Complaint(f"line {line}: the key {key!r} is not text. Put it in quotes.")
            if key in first_lines:
                raise _Complaint(
                    f"line {line}: {key} was already given on line {first_lines[key]}. "
                    "Keep one of the two."
                )
            first_lines[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


class _Complaint(Exception):
    """A finding of the loader, worded for the user."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping that the file at ``path`` holds.

    Raises:
        ConfigError: The file is missing, unreadable, empty, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file. `paralign init` writes a RUN.yaml to start from."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8 text. Give a RUN.yaml, saved as UTF-8."
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: cannot be read: {reason}. Give a RUN.yaml.") from None
    value = _parse(text, str(path))
    if value is None:
        raise ConfigError(
            f"{path}: the file is empty. `paralign init` writes a RUN.yaml to start from."
        )
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: the file holds {describe_type(value)}, but must hold sections such as "
            "`mesh: {pp: 2}`. `paralign init` writes a RUN.yaml to start from."
        )
    return value


def parse_value(text: str, where: str) -> Any:
    """Return ``text`` typed as YAML types it: ``2`` is a number, ``true`` a boolean.

    Raises:
        ConfigError: ``text`` is not YAML.
    """
    return _parse(text, where)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except _Complaint as complaint:
        raise ConfigError(f"{where}, {complaint}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(
            f"{where}{line}: not valid YAML: {reason}. "
            "Check brackets, colons, quotes and indentation."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from None


def describe_type(value: Any) -> str:
    """Return in plain words what kind of YAML value this is."""
    words = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "a section",
        type(None): "null",
    }
    return words.get(type(value), f"a {type(value).__name__}")
