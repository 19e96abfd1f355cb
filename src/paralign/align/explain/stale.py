"""Hypotheses about time: values of an earlier moment, or of two moments at once.

A gradient that was not zeroed is this step's plus the last one's; a buffer that was not refreshed
is the last one's; an optimizer that holds other tensors than the model leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralign.align.explain.context import Context
from paralign.align.explain.proof import Mix, Proof, Readable, left_in_all, limit_of, proves
from paralign.align.judge import Compared
from paralign.align.pair import Moment, Quantity, Side
from paralign.align.trace import Kind

STALE = "stale"


def prove_stale(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ``item`` holds what an earlier step left."""
    if limit_of(item) is None:
        return None
    earlier = _earlier(context, item)
    for number, (step, source) in enumerate(earlier):
        left = left_in_all(item, source, item.measured.total.base)
        if proves(item, left):
            return Proof(
                STALE,
                left,
                component="state",
                key=(STALE, "old", number),
                detail={"of_step": step},
                text=f"It is the {item.moment.kind} of step {step}, unchanged. Look for a buffer "
                "that is not refreshed, or a hook that did not run in this step.",
            )
    if item.moment.kind == Kind.GRAD:
        # What a step leaves in the gradients is what the optimizer used: after clipping.
        return _prove_sum(item, earlier) or _prove_sum(
            item, _earlier(context, item, Kind.CLIPPED_GRAD)
        )
    return _prove_sum(item, earlier)


def _prove_sum(item: Compared, earlier: Sequence[tuple[int, Readable]]) -> Proof | None:
    """Return the proof that ``item`` is the right tensor plus those of earlier steps."""
    total: tuple[tuple[float, Readable], ...] = ((1.0, item.base),)
    steps = []
    for step, source in earlier:
        total += ((1.0, source),)
        steps.append(step)
        left = left_in_all(item, Mix(total), item.measured.total.base)
        if proves(item, left):
            return Proof(
                STALE,
                left,
                component="state",
                key=(STALE, "sum", tuple(steps)),
                detail={"adds_steps": list(steps)},
                text=f"It is this step's {item.moment.kind} plus that of step "
                f"{', '.join(map(str, steps))}: it was not zeroed. Call optimizer.zero_grad() "
                "after every step, on every parameter.",
            )
    return None


def _earlier(
    context: Context, item: Compared, kind: str | None = None
) -> list[tuple[int, Readable]]:
    """Return the same tensor (or another kind of it) of earlier steps in the reference.

    The latest first.
    """
    found: list[tuple[int, Readable]] = []
    for step in sorted((s for s in context.steps if s < item.moment.step), reverse=True):
        moment = Moment.of(step, kind or item.moment.kind, item.moment.state or None)
        quantity = whole_quantity(context.reference, moment, item.row.name)
        if quantity is not None:
            found.append((step, quantity))
    if item.moment.kind == Kind.GRAD and len(found) > 1:
        return found[:4]  # accumulation over more steps than this shows at the second one already
    return found


def whole_quantity(side: Side, moment: Moment, name: str) -> Quantity | None:
    """Return a tensor of a run; None if it was not recorded, or not all of it."""
    quantity = side.quantity(moment, name)
    if quantity is None or not quantity.is_present or quantity.problems:
        return None
    return quantity
