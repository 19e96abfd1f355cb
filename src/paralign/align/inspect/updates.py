"""Parameters that the optimizer should have moved and did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paralign.align.budget import EPS
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import Held, View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_CLEARLY = 4.0  # units in the last place that a step has to be worth before its absence says much


def check_updates(view: View) -> Check:
    """Look for parameters that are bitwise the same after a step although they have a gradient."""
    check = Check("updates")
    for step in view.steps:
        _check_step(view, step, check)
        if check.findings:
            break
    if not check.looked_at and check.why_not is None:
        check.why_not = "no parameters were recorded before and after a step, with their gradients"
    return check


def _check_step(view: View, step: int, check: Check) -> None:
    options = _options(view)
    still: dict[str, set[int]] = {}
    moved: set[str] = set()
    tiny = 0
    gradients = view.tensors(Kind.GRAD, step)
    after, before = view.tensors(Kind.PARAM_AFTER, step), view.before(step)
    for name, held in after.items():
        if name in view.noise_names(step):
            continue
        for piece, earlier, gradient in _together(held, before.get(name), gradients.get(name)):
            if view.fingerprint(gradient).norm == 0.0:
                continue
            check.looked_at += 1
            if view.fingerprint(piece).digest != view.fingerprint(earlier).digest:
                moved.add(name)
            elif _is_worth_a_step(view, earlier, gradient, options.get(name)):
                still.setdefault(name, set()).add(piece.rank)
            else:
                tiny += 1
    if tiny:
        check.notes.append(
            f"{tiny} pieces did not move at step {step}, but their step is smaller than the "
            "rounding of what they are stored in, or its size is not known"
        )
    if still:
        check.findings.append(_finding(view, step, still, moved, options, after))


def _together(
    held: Sequence[Held], before: Sequence[Held] | None, gradients: Sequence[Held] | None
) -> list[tuple[Held, Held, Held]]:
    """Return every piece after the step with the one before it and its gradient."""
    earlier = {(piece.rank, piece.place, piece.entry.source): piece for piece in before or ()}
    gradient = {(piece.rank, piece.place, piece.entry.source): piece for piece in gradients or ()}
    found = []
    for piece in held:
        key = (piece.rank, piece.place, piece.entry.source)
        was, used = earlier.get(key), gradient.get(key)
        if was is None or used is None or used.entry.partial_over or not piece.entry.trainable:
            continue
        if all(one.entry.file is not None for one in (piece, was, used)):
            found.append((piece, was, used))
    return found


def _options(view: View) -> dict[str, dict[str, Any]]:
    """Return per parameter the class and options of the optimizer that steps it."""
    return {
        name: {"class": optimizer["class"], **group["options"]}
        for index in view.reader.ranks
        for optimizer in index.optimizers
        for group in optimizer["groups"]
        for name in group["names"]
    }


def _is_worth_a_step(
    view: View, before: Held, gradient: Held, options: Mapping[str, Any] | None
) -> bool:
    """Whether the step would show in the dtype that the parameter is stored in."""
    rate = 1.0 if options is None else options.get("lr")
    if not isinstance(rate, int | float) or rate == 0:
        return False
    if options is None:
        return True  # no optimizer holds it, so no step however small
    found = view.fingerprint(gradient)
    if "adam" in str(options["class"]).lower() or "lion" in str(options["class"]).lower():
        step = float(rate)  # every element moves by about the rate
    else:
        step = float(rate) * found.largest
    stored = EPS.get(before.entry.dtype, EPS["float32"])
    return step > _CLEARLY * stored * view.fingerprint(before).largest


def _finding(
    view: View,
    step: int,
    still: Mapping[str, set[int]],
    moved: set[str],
    options: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Sequence[Held]],
) -> Finding:
    names = list(still)
    ranks = sorted(set().union(*still.values()))
    axes: list[str] = []
    for name, where in still.items():
        split = view.split({piece.rank: piece.rank in where for piece in after[name]})
        axes += split.axes if split else ()
    orphans = [name for name in names if options and name not in options]
    told = f"{len(names)} parameters are bitwise unchanged by step {step} on rank "
    told += f"{', '.join(map(str, ranks[:6]))}{', ...' if len(ranks) > 6 else ''}, although their "
    told += "gradient is not zero. "
    if orphans:
        told += (
            f"No optimizer holds {len(orphans)} of them, first {orphans[0]}: build the optimizer "
            "from the parameters that the wrapped model has."
        )
    elif not moved:
        told += (
            "Nothing moved at all: does the optimizer hold the parameters of the wrapped model, or "
            "those of before?"
        )
    elif axes:
        told += f"Their copies or other parts over {', '.join(dict.fromkeys(axes))} did move: "
        told += "gather the new values on every rank."
    else:
        told += "The others moved: see which optimizer steps these, and whether it did."
    return Finding(
        component="optimizer",
        cause="missing_contribution" if orphans else "stale",
        tensor=names[0],
        axes=list(dict.fromkeys(axes)),
        evidence={
            "step": step,
            "parameters": len(names),
            "names": names[:8],
            "ranks": ranks,
            "moved": len(moved),
            "without_optimizer": len(orphans),
        },
        fix=told,
        where=view.where(names[0]),
    )
