"""The run as a chain of moments in causal order, and where it first left its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paralign.align.report.numbers import finite, short
from paralign.align.verdict import Finding, Report, TensorRow

CONFIG = "config"

# Tensors of these kinds are made one after another; of others the worst tells more than the first.
_IN_ORDER = ("input", "output", "output_grad")
_TITLES = {
    "input": "inputs",
    "param": "initial parameters",
    "output": "module outputs",
    "tokens": "valid tokens",
    "loss": "loss",
    "output_grad": "output gradients",
    "micro_grad": "micro-batch gradients",
    "grad": "gradients",
    "norm": "gradient norm",
    "clipped_grad": "clipped gradients",
    "moment": "optimizer state",
    "update": "updates",
    "param_after": "parameters after",
}


@dataclass(frozen=True)
class Station:
    """One moment: every tensor of a kind at a step."""

    title: str
    text: str
    ok: bool
    is_first: bool = False
    """It is where the runs part."""
    row: int | None = None
    """Which of the report's tensors to look at."""


@dataclass(frozen=True)
class StepLine:
    """The stations of one step."""

    title: str
    stations: list[Station]

    @property
    def ok(self) -> bool:
        """Whether nothing of it is out of budget."""
        return all(station.ok for station in self.stations)


def timeline(report: Report) -> list[StepLine]:
    """Return the stations of every step; what was known before all of them heads the first."""
    differing = [finding for finding in report.findings if finding.component == CONFIG]
    head = [_facts(differing)] if report.facts or differing else []
    parted = bool(differing)
    lines = []
    items = list(enumerate(report.tensors))
    for step, of_step in groupby(items, key=lambda item: item[1].step):
        stations, head = head, []
        for _, group in groupby(of_step, key=lambda item: (item[1].kind, item[1].state)):
            station = _station(list(group), may_be_first=not parted)
            parted |= not station.ok
            stations.append(station)
        lines.append(StepLine(f"step {step}", stations))
    return lines or ([StepLine("before", head)] if head else [])


def kind_title(kind: str) -> str:
    """Return the words for a kind of tensor."""
    return _TITLES.get(kind, kind.replace("_", " "))


def _facts(differing: Sequence[Finding]) -> Station:
    text = f"{len(differing)} differ" if differing else "agree"
    return Station("facts and config", text, ok=not differing, is_first=bool(differing))


def _station(items: Sequence[tuple[int, TensorRow]], *, may_be_first: bool) -> Station:
    first = items[0][1]
    title = kind_title(first.kind) + (f" {first.state}" if first.state else "")
    failing = [(at, row) for at, row in items if not row.ok]
    gated = [(at, row) for at, row in items if row.budget_eps is not None]
    at, worst = max(gated or items, key=lambda item: (item[1].strain, finite(item[1].eps)))
    if failing:
        is_ordered = first.kind in _IN_ORDER
        at, worst = failing[0] if is_ordered else max(failing, key=lambda item: item[1].strain)
        text = f"{short(worst.eps)} eps, out of budget"
        if len(items) > 1:
            which = "first" if is_ordered else "worst"
            text = (
                f"{len(failing)} of {len(items)} out of budget, {which} {worst.name or 'the model'}"
            )
    elif not gated:
        text = f"{len(items)} listed, not gated"
    elif len(items) == 1:
        text = f"{short(worst.eps)} eps"
    elif worst.eps == 0:
        text = f"all {len(items)} equal"
    else:
        text = f"{len(items)} in budget, worst {short(worst.eps)} eps"
    return Station(title, text, ok=not failing, is_first=bool(failing) and may_be_first, row=at)
