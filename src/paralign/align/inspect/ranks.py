"""What ranks say about themselves: optimizer options, shapes, dtypes and flags that differ."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from paralign.align.facts import MUST_AGREE
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import Held, View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_ranks(view: View) -> Check:
    """Hold what every rank says about a parameter against what the others say of the same one."""
    check = Check("ranks")
    options = _options(view)
    entries = _entries(view)
    check.looked_at = len(options) + len(entries)
    if view.world_size == 1:
        check.looked_at = 0
        check.why_not = "there is one rank"
        return check
    said = _run_facts(view)
    check.looked_at += len(said)
    check.findings += [
        *_disagree(view, "the fact", {fact: {"": values} for fact, values in said.items()}),
        *_disagree(view, "the optimizer option", _by_fact(options)),
        *_between_stages(view, options),
        *_disagree(view, "the", _by_fact(entries)),
    ]
    return check


Said = dict[str, dict[int, dict[str, Any]]]
"""Name -> rank -> fact -> value."""


def _options(view: View) -> Said:
    """Return per parameter and rank the class and options of the optimizer that steps it."""
    said: Said = {}
    for index in view.reader.ranks:
        for optimizer in index.optimizers:
            for group in optimizer["groups"]:
                for name in group["names"]:
                    facts = {"class": optimizer["class"], **group["options"]}
                    said.setdefault(name, {})[index.rank] = facts
    return said


def _run_facts(view: View) -> dict[str, dict[int, Any]]:
    """Return per fact that all of a run must agree on what each rank said; ranks may be silent."""
    facts = (*MUST_AGREE, "num_microbatches")
    said = {
        fact: {index.rank: index.run[fact] for index in view.reader.ranks if fact in index.run}
        for fact in facts
    }
    return {fact: values for fact, values in said.items() if len(values) > 1}


def _entries(view: View) -> Said:
    said: Said = {}
    for step in view.steps[:1]:
        for kind in (Kind.PARAM, Kind.GRAD):
            for name, held in view.tensors(kind, step).items():
                for piece in held:
                    said.setdefault(name, {}).setdefault(piece.rank, {}).update(_facts(kind, piece))
    return said


def _facts(kind: str, piece: Held) -> dict[str, Any]:
    entry = piece.entry
    return {
        f"{kind} dtype": entry.dtype,
        "global shape": list(entry.shape),
        "requires_grad flag": entry.trainable,
    }


def _by_fact(said: Said) -> dict[str, dict[str, dict[int, Any]]]:
    """Turn it around: fact -> name -> rank -> value."""
    turned: dict[str, dict[str, dict[int, Any]]] = {}
    for name, ranks in said.items():
        for fact in sorted({fact for facts in ranks.values() for fact in facts}):
            turned.setdefault(fact, {})[name] = {
                rank: facts.get(fact) for rank, facts in ranks.items()
            }
    return turned


def _disagree(
    view: View, what: str, facts: Mapping[str, Mapping[str, Mapping[int, Any]]]
) -> Iterator[Finding]:
    for fact, names in facts.items():
        differing: dict[tuple[str, ...], list[str]] = {}
        for name, values in names.items():
            split = view.split({rank: repr(value) for rank, value in values.items()})
            if split is not None:
                differing.setdefault(split.axes, []).append(name)
        for axes, wrong in differing.items():
            values = names[wrong[0]]
            yield _finding(f"{what} {fact}", values, axes, wrong)


def _between_stages(view: View, options: Said) -> Iterator[Finding]:
    """Find options that each stage gives to all its layers, and another stage does not."""
    if "pp" not in view.axes:
        return
    roles: dict[str, dict[int, list[str]]] = {}
    values: dict[str, dict[int, dict[str, Any]]] = {}
    for name, ranks in options.items():
        role = _NUMBER.sub("#", name, count=1)
        if role == name:
            continue
        for rank, facts in ranks.items():
            roles.setdefault(role, {}).setdefault(rank, []).append(repr(facts))
            values.setdefault(role, {})[rank] = facts
    differing: dict[str, tuple[dict[int, Any], list[str]]] = {}
    for role, by_rank in roles.items():
        by_layer = any(len(set(kinds)) > 1 for kinds in by_rank.values())
        if by_layer or all(len(kinds) == 1 for kinds in by_rank.values()):
            continue  # as wanted, or too few layers to tell
        for option in sorted({o for facts in values[role].values() for o in facts}):
            given = {rank: facts.get(option) for rank, facts in values[role].items()}
            split = view.split({rank: repr(value) for rank, value in given.items()})
            if split is not None and split.axes == ("pp",):
                differing.setdefault(option, (given, []))[1].append(role)
    for option, (given, wrong) in differing.items():
        yield _finding(f"the optimizer option {option}", given, ("pp",), wrong)


def _finding(
    fact: str, values: Mapping[int, Any], axes: tuple[Hashable, ...], names: list[str]
) -> Finding:
    shown: dict[str, list[int]] = {}
    for rank, value in values.items():
        shown.setdefault(repr(value), []).append(rank)
    told = ", ".join(
        f"{value} on rank {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
        for value, ranks in shown.items()
    )
    return Finding(
        component="config",
        cause="different_config",
        tensor=names[0] or None,
        axes=[str(axis) for axis in axes],
        evidence={"fact": fact, "ranks": shown, "names": [name for name in names[:8] if name]},
        fix=f"{fact}{f' of {len(names)} parameters' if names[0] else ''} differs between ranks: "
        f"{told}. Give every rank the same.",
    )
