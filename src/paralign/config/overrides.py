"""Applies ``--set key.path=value`` to a raw config before it is validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paralign.config.nearest import suggest
from paralign.config.parse import SECTIONS, explain_unknown
from paralign.config.run import ModelSection, RunConfig
from paralign.config.source import describe_type, parse_value
from paralign.errors import ConfigError


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``raw`` with every ``key.path=value`` of ``overrides`` put in, in order.

    Values are typed as YAML types them. The key need not be in ``raw``, but must be one that a
    RUN.yaml can have.

    Raises:
        ConfigError: An override is not ``key.path=value``, its value is not YAML, or there is no
            such key. All problems are listed.
    """
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    problems = []
    for override in overrides:
        try:
            _apply(result, override)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError.from_problems("cannot apply --set", problems)
    return result


def _apply(result: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(
            f"{override!r} is not of the form key.path=value. Write for example mesh.pp=2."
        )
    _check_path(override, path)
    value = parse_value(text, f"{override!r}")
    section, _, key = path.partition(".")
    if not key:
        result[section] = value
        return
    keys = result.get(section)
    if keys is None:
        keys = result[section] = {}
    if not isinstance(keys, dict):
        raise ConfigError(
            f"{override!r}: {section} is {describe_type(keys)} in the file, not a section, so "
            f"{path} cannot be set. Make {section} a section."
        )
    keys[key] = value


def _check_path(override: str, path: str) -> None:
    section, dot, key = path.partition(".")
    if section not in RunConfig.model_fields:
        raise ConfigError(f"{override!r}: {explain_unknown('', section)}")
    if not dot:
        return
    if section not in SECTIONS:
        raise ConfigError(f"{override!r}: {section} has no keys below it. Write {section}=value.")
    if "." in key:
        raise ConfigError(
            f"{override!r}: paths have two parts, section.key. "
            + suggest(path, [f"{section}.{name}" for name in SECTIONS[section].model_fields])
        )
    if SECTIONS[section] is not ModelSection and key not in SECTIONS[section].model_fields:
        raise ConfigError(f"{override!r}: {explain_unknown(section, key)}")
