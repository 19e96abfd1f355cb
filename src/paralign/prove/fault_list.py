"""All faults there are: paralign's own, by the part of a step they break, and a user's."""

from __future__ import annotations

from pathlib import Path

from paralign.prove.fault import Fault, faults_in, load_faults, unique
from paralign.prove.faults import (
    backward,
    clipping,
    data,
    experts,
    forward,
    loss,
    optimizer,
    precision,
    recompute,
    reduction,
    state,
    tensor,
    weights,
)

FAMILIES = (
    data,
    weights,
    forward,
    loss,
    backward,
    reduction,
    clipping,
    optimizer,
    state,
    tensor,
    experts,
    precision,
    recompute,
)


def built_in_faults() -> list[Fault]:
    """Return paralign's own faults, in causal order of what they break."""
    return [fault for family in FAMILIES for fault in faults_in(family)]


def all_faults(file: str | Path | None = None) -> list[Fault]:
    """Return paralign's own faults and those of a user's file.

    Raises:
        ConfigError: The file declares none, or one with the name of another.
    """
    own = [] if file is None else load_faults(file)
    return list(unique([*built_in_faults(), *own]))
