"""Hypotheses about which modules ran: another number of times, or in another order.

Stages that overlap run a layer twice, stages with a gap between them run one never, and a list in
the wrong order runs a later one first. That is counted, not measured: a recording has an output for
every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paralign.align.explain.context import Context
from paralign.align.explain.placement import WRONG_LAYER
from paralign.align.explain.proof import Proof
from paralign.align.judge import Compared
from paralign.align.numbering import Numbered
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader


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
    own, step = Numbered.of(item.row.name), item.moment.step
    if own is None:
        return None
    for index in context.trace.ranks:
        first: dict[int, int] = {}  # layer -> place in the order of execution
        for entry in index.tensors:
            if entry.kind == Kind.OUTPUT and (entry.step, entry.micro_batch) == (step, 0):
                layer = Numbered.of(entry.name.partition("[")[0])
                if layer is not None and layer.head == own.head:
                    place = entry.order or 0
                    first[layer.number] = min(first.get(layer.number, place), place)
        begin = first.get(own.number, -1)
        later = [number for number, place in first.items() if number > own.number and place < begin]
        if later:
            other = Numbered(own.head, min(later), "").layer
            return Proof(
                WRONG_LAYER,
                math.nan,
                key=(WRONG_LAYER, "order"),
                detail={"module": other, "ran_before": own.layer},
                text=f"{other} ran before {own.layer} on rank {index.rank}, where the reference "
                "runs it after: run the layers of a stage in the order of their numbers.",
            )
    return None


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
