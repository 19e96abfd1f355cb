"""Hypotheses about the state that a step started from, read out of the state it left.

A moment is ``beta * before + input``. Where a run's input was right, its moment less the
reference's is ``beta`` times what differed before the step: in what was kept, offloaded or reloaded
since the last one. So another past is proven on the tensor, though nobody recorded it.

Ref:
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    https://arxiv.org/abs/1412.6980
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paralign.align.explain.context import Context
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.options import options_of
from paralign.align.explain.placement import WRONG_LAYER
from paralign.align.explain.proof import Mix, Proof, Readable, left_in_all, limit_of, proves
from paralign.align.explain.stale import STALE, whole_quantity
from paralign.align.judge import Compared
from paralign.align.pair import Moment, Quantity
from paralign.align.trace import Kind


def prove_other_past(context: Context, item: Compared) -> Proof | None:
    """Return the proof that a moment was made from another one than the last step left."""
    step, state, name = item.moment.step, item.moment.state, item.row.name
    before = _left_by(context, step - 1, state, name)
    beta = _beta(options_of(context, name), state)
    if before is None or not beta or limit_of(item) is None:
        return None
    for past, proof in _pasts(context, item):
        terms: list[tuple[float, Readable]] = [(1.0, item.base), (-beta, before)]
        if past is not None:
            terms.append((beta, past))
        proof.left = left_in_all(item, Mix(tuple(terms)), item.measured.total.base)
        if proves(item, proof.left):
            return proof
    return None


def _pasts(context: Context, item: Compared) -> Iterator[tuple[Quantity | None, Proof]]:
    """Yield what may have stood there before the step (None: zeros), and what it would mean."""
    step, state, name = item.moment.step, item.moment.state, item.row.name
    yield (
        None,
        _proof(
            MISSING_CONTRIBUTION,
            f"It is this step's input alone: {state} was zero before step {step}. Keep, save and "
            "load the optimizer's state together with the parameters.",
            of="zeros",
        ),
    )
    for other in context.judged(item.moment.kind, step):
        if other.moment.state != state or other is item or other.base.shape != item.base.shape:
            continue
        past = _left_by(context, step - 1, state, other.row.name)
        if past is not None:
            yield (
                past,
                _proof(
                    WRONG_LAYER,
                    f"Before step {step} the {state} of {other.row.name} stood in its place. Pair "
                    "states with parameters by name where they are loaded, not by position.",
                    of=other.row.name,
                ),
            )
    for earlier in sorted((s for s in context.steps if s < step - 1), reverse=True):
        past = _left_by(context, earlier, state, name)
        if past is not None:
            yield (
                past,
                _proof(
                    STALE,
                    f"Before step {step} the {state} of step {earlier} stood there: an old copy "
                    "was put back.",
                    of=f"step {earlier}",
                ),
            )


def _proof(cause: str, text: str, *, of: str) -> Proof:
    key = (cause, "before", of if cause == STALE else "")
    return Proof(cause, 0.0, component="state", key=key, detail={"before": of}, text=text)


def _beta(options: Mapping[str, Any], state: str) -> float | None:
    """Return how much of the last step's moment the optimizer keeps."""
    betas = options.get("betas")
    if state in ("exp_avg", "exp_avg_sq") and isinstance(betas, list | tuple):
        return float(betas[0 if state == "exp_avg" else 1])
    momentum = options.get("momentum")
    return float(momentum) if state == "momentum_buffer" and momentum else None


def _left_by(context: Context, step: int, state: str, name: str) -> Quantity | None:
    """Return the state that a step of the reference left."""
    return whole_quantity(context.reference, Moment.of(step, Kind.MOMENT, state), name)
