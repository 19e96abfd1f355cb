"""Rules that give a parameter its global name, or the names of the parameters fused in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paralign.align.fused import Fused, FusedPart
from paralign.errors import ConfigError

NameRule = Mapping[str, "str | Fused"] | Callable[[str], "str | Fused"] | None


@dataclass(frozen=True)
class NewName:
    """A name that a rule gives, and which part of the parameter it is the name of."""

    name: str
    part: FusedPart | None = None


@dataclass
class NameRules:
    """``names=`` of :func:`paralign.align.record.record`, and which of its patterns were used.

    Args:
        rule: Old name or pattern -> new name or ``Fused``; or a function of the old name. ``*``
            stands for any text, and in the new name for what it matched, in order.
    """

    rule: NameRule
    used: set[str] = field(default_factory=set)

    def of(self, name: str) -> list[NewName]:
        """Return the new names of a parameter: one, or one per part of a fused one.

        Raises:
            ConfigError: A new name has more ``*`` than its pattern, or is not a name.
        """
        if self.rule is None:
            return [NewName(name)]
        if not isinstance(self.rule, Mapping):
            return _new_names(self.rule(name), (), name)
        if name in self.rule:
            self.used.add(name)
            return _new_names(self.rule[name], (), name)
        for pattern, new in self.rule.items():
            if (matched := match(pattern, name)) is not None:
                self.used.add(pattern)
                return _new_names(new, matched, pattern)
        return [NewName(name)]

    @property
    def patterns(self) -> list[str]:
        """Names and patterns of the rule; a function has none."""
        return list(self.rule) if isinstance(self.rule, Mapping) else []

    def unused(self) -> list[str]:
        """Return names and patterns that no parameter has matched."""
        return sorted(set(self.patterns) - self.used)


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return what each ``*`` of ``pattern`` stands for in ``name``; None if it does not match."""
    found = re.fullmatch("(.*?)".join(re.escape(text) for text in pattern.split("*")), name)
    return found.groups() if found else None


def first_match(patterns: Mapping[str, object], *names: str) -> str | None:
    """Return the first of ``patterns`` that matches one of ``names``."""
    for pattern in patterns:
        if any(match(pattern, name) is not None for name in names):
            return pattern
    return None


def _new_names(new: object, matched: tuple[str, ...], pattern: str) -> list[NewName]:
    if isinstance(new, Fused):
        return [
            NewName(_fill(name, matched, pattern), FusedPart(new, index))
            for index, name in enumerate(new.parts)
        ]
    if not isinstance(new, str) or not new:
        raise ConfigError(
            f"names[{pattern!r}]={new!r} must be the new name, or pa.Fused(...) where the "
            "parameter holds several"
        )
    return [NewName(_fill(new, matched, pattern))]


def _fill(name: str, matched: tuple[str, ...], pattern: str) -> str:
    pieces = name.split("*")
    if len(pieces) - 1 > len(matched):
        raise ConfigError(
            f"names[{pattern!r}]={name!r} has {len(pieces) - 1} '*', but the pattern only "
            f"{len(matched)}. Each '*' of a new name is what the same '*' of the pattern matched."
        )
    values = [*matched[: len(pieces) - 1], ""]
    return "".join(piece + value for piece, value in zip(pieces, values, strict=True))
