"""Reads a RUN.yaml into a ``RunConfig``, or says everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from paralign.config.auto_degree import fill_auto_degree
from paralign.config.overrides import apply_overrides
from paralign.config.parse import parse
from paralign.config.rules import find_problems
from paralign.config.run import RunConfig
from paralign.config.source import read_config
from paralign.errors import ConfigError


def load_config(
    path: str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
) -> RunConfig:
    """Read and check the config at ``path``. Imports no torch.

    Args:
        path: A RUN.yaml.
        overrides: ``key.path=value`` texts, applied in order; values are typed as in YAML.
        world_size: Number of ranks that exist already, such as torchrun's; None where they will be
            started to fit the mesh.

    Raises:
        ConfigError: The file, an override, a key, a value or a rule is wrong. All are listed.
    """
    raw = apply_overrides(read_config(Path(path)), overrides)
    return resolve_config(raw, name=str(path), world_size=world_size)


def resolve_config(
    raw: Mapping[str, Any], *, name: str = "the config", world_size: int | None = None
) -> RunConfig:
    """Check a config that is already a mapping, as :func:`load_config` does one in a file.

    Args:
        raw: Sections by name, as YAML would give them.
        name: What messages call it.
        world_size: See :func:`load_config`.

    Raises:
        ConfigError: A key, a value or a rule is wrong. All are listed.
    """
    filled, problems = fill_auto_degree(raw, world_size)
    parsed = parse(filled)
    # A mesh that lacks a degree is not also blamed for the number of ranks that it has.
    known = None if problems else world_size
    problems += parsed.problems
    problems += find_problems(parsed.config, unsound=parsed.unsound, world_size=known)
    if problems:
        raise ConfigError.from_problems(name, problems)
    return parsed.config
