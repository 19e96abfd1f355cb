"""Hypotheses about which modules ran: another number of times, or in another order.

Stages that overlap run a layer twice, stages with a gap between them run one never, and a list in
the wrong order runs a later one first. That is counted, not measured: a recording has an output for
every call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from paralign.align.explain.context import Context
from paralign.align.explain.proof import Proof
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader

WRONG_LAYER = "wrong_layer"


def prove_other_calls(context: Context, item: Compared) -> Proof | None:
    """Return the finding that what ran before ``item`` ran more or less often than it should.

    A module that did not run at all counts only if its parameters got no gradient either: it may
    just not have been recorded.
    """
    step = item.moment.step
    ours = calls_per_forward(context.trace, step)
    theirs = calls_per_forward(context.reference.reader, step)
    for name in _just_before(item.row.name, ours, theirs):
        made, due = ours.get(name, 0), theirs[name]
        if made == due or (made == 0 and not _has_no_gradient(context, step, name)):
            continue
        return Proof(
            WRONG_LAYER,
            math.nan,
            key=(WRONG_LAYER, "calls"),
            detail={"module": name, "calls": made, "calls_in_reference": due},
            text=f"{name} ran {_times(made)} per forward, where the reference runs it "
            f"{_times(due)}, and what follows it is the first that is off. Give every layer to one "
            "stage: a stage ends where the next one starts.",
        )
    return None


def prove_other_order(context: Context, item: Compared) -> Proof | None:
    """Return the finding that a rank ran a later layer before the one that ``item`` belongs to.

    In the first forward alone: whatever the schedule, one micro-batch goes through the layers in
    their order.
    """
    layer = _layer_of(item.row.name)
    step = item.moment.step
    for index in context.trace.ranks if layer is not None else ():
        first: dict[str, int] = {}
        for entry in index.tensors:
            if entry.kind == Kind.OUTPUT and (entry.step, entry.micro_batch) == (step, 0):
                at = _layer_of(entry.name) or ""
                first[at] = min(first.get(at, entry.order or 0), entry.order or 0)
        begin = first.get(layer or "")
        later = [
            other
            for other, order in first.items()
            if begin is not None and order < begin and _comes_after(other, layer or "")
        ]
        if later:
            return Proof(
                WRONG_LAYER,
                math.nan,
                key=(WRONG_LAYER, "order"),
                detail={"module": later[0], "ran_before": layer},
                text=f"{later[0]} ran before {layer} on rank {index.rank}, where the reference "
                "runs it after: run the layers of a stage in the order of their numbers.",
            )
    return None


def _layer_of(name: str) -> str | None:
    """Return the part of a module's name up to its first number; None if it has none."""
    found = re.match(r"(?:[^.\[]+\.)*?\d+(?=\.|\[|$)", name)
    return None if found is None else found.group()


def _comes_after(name: str, other: str) -> bool:
    """Whether a layer has a higher number in the same list of layers."""
    (ours, at), (theirs, place) = (
        (n.rpartition(".")[0], n.rpartition(".")[2]) for n in (name, other)
    )
    return ours == theirs and at.isdigit() and place.isdigit() and int(at) > int(place)


def calls_per_forward(trace: TraceReader, step: int) -> dict[str, int]:
    """Return how often each module returned something in a forward, in the order of execution."""
    calls: dict[str, int] = {}
    order: dict[str, tuple[int, int]] = {}
    for index in trace.ranks:
        for entry in index.tensors:
            if entry.kind == Kind.OUTPUT and entry.step == step:
                name = entry.name.partition("[")[0]
                calls[name] = max(calls.get(name, 0), (entry.call or 0) + 1)
                at = (index.rank, entry.order or 0)
                order[name] = min(order.get(name, at), at)
    return {name: calls[name] for name in sorted(calls, key=lambda name: order[name])}


def _just_before(name: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """Return what ran between the last module that ran as often as due and this, outer ones first.

    All of it did or should have; ``theirs`` is in the order of execution.
    """
    order = list(theirs)
    if name not in theirs:
        return []
    end = order.index(name)
    usual = [at for at in range(end) if ours.get(order[at]) == theirs[order[at]]]
    begin = usual[-1] + 1 if usual else 0
    return sorted(order[begin:end], key=lambda module: module.count("."))


def _has_no_gradient(context: Context, step: int, name: str) -> bool:
    """Whether the module has parameters and none of them got a gradient."""
    grads = [
        grad for grad in context.judged(Kind.GRAD, step) if grad.row.name.startswith(f"{name}.")
    ]
    return bool(grads) and all(
        grad.measured.total.size == 0.0 and grad.measured.total.base > 0.0 for grad in grads
    )


def _times(number: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(number, f"{number} times")
