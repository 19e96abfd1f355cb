"""Compare every tensor of two traces, in causal order, and hold each against its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from paralign.align.ahead import results_ahead
from paralign.align.amplify import amplified_noise
from paralign.align.budget import EPS, FP64_TENSOR, SQUARE_FACTOR, Budget, Yardstick
from paralign.align.measure import (
    Measured,
    are_bitwise_equal,
    count_unequal,
    measure,
)
from paralign.align.pair import UPDATE, Moment, Quantity, Side
from paralign.align.places import PLACEMENT, own_name
from paralign.align.rows import tensor_row
from paralign.align.trace import TOKEN_KINDS, Kind
from paralign.align.verdict import DISCRETE, EXACT, ORDINARY, ZERO_IN_THEORY, TensorRow

# Replicas of one reference that differ by more are no reference, whatever the budget rests on.
_LOOSE_EPS = 1e3


@dataclass
class Compared:
    """A row with what it was measured from, so that a hypothesis can be tested on the numbers."""

    moment: Moment
    row: TensorRow
    side: Quantity
    base: Quantity
    measured: Measured
    tolerance: float | None
    """Relative; None: not gated."""

    def relative_if(self, factor: float) -> float:
        """Return the relative error left if the base is multiplied by ``factor`` first."""
        return measure(self.side, self.base, factor=factor).total.relative / abs(factor)


@dataclass
class _Pair:
    name: str
    side: Quantity
    reference: Quantity
    base: Quantity
    measured: Measured
    own: float | None = None
    """The reference's distance from the truth."""


class Judge:
    """Measures and judges all tensors that both sides recorded.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        truth: An fp64 run of the same weights and data, or None.
        budget: The tolerances.
        steps: The steps that both sides recorded.
        noise: A second, perturbed or re-ordered run of the reference, or None.
    """

    def __init__(
        self,
        reference: Side,
        parallel: Side,
        truth: Side | None,
        budget: Budget,
        steps: Sequence[int],
        *,
        noise: Side | None = None,
    ) -> None:
        self._reference = reference
        self._parallel = parallel
        self._truth = truth
        self._noise = noise
        self._budget = budget
        self._steps = steps
        self.compared: list[Compared] = []
        self.skipped: list[dict[str, str]] = []
        self.reference_problems: list[str] = []
        self.notes: list[str] = []
        self.names: dict[str, int] = {}
        """Every parameter seen and its number of elements."""
        self.without_gradient: set[str] = set()
        self.largest_noise: float | None = None
        """Of the gradients that the reference's second run measured."""
        self._zero_names: set[str] = set()
        self._global_norm: dict[int, float] = {}
        self._parameter_norm: dict[tuple[int, str], tuple[float, float]] = {}
        self._gradient_tolerance: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        """Compare everything; fills the public attributes."""
        ours, theirs = set(self._reference.moments()), set(self._parallel.moments())
        for moment in self._ordered(ours | theirs):
            missing = [
                side
                for side, has in (("reference", moment in ours), ("parallel run", moment in theirs))
                if not has
            ]
            if moment.kind == Kind.MICRO_GRAD:
                continue  # summands: what they add up to is compared
            if missing:
                self._skip(str(moment), f"not recorded in the {missing[0]}")
            elif moment.kind == Kind.PARAM:
                self._compare_initial(moment)
            else:
                pairs = list(self._pairs(moment))
                if moment.kind == Kind.GRAD:
                    self._note_zero_in_theory(moment, pairs)
                self._judge(moment, pairs)
        self.compared.sort(key=lambda item: item.moment)

    def _ordered(self, moments: Iterable[Moment]) -> list[Moment]:
        """Within a step parameters come before updates, whose budget needs their norms."""

        def key(moment: Moment) -> tuple[int, bool, Moment]:
            return moment.step, moment.kind == UPDATE, moment

        # What token maps place is compared by ``activation_judge``.
        return sorted(
            (m for m in moments if m.step in self._steps and m.kind not in TOKEN_KINDS), key=key
        )

    def _pairs(self, moment: Moment) -> Iterator[_Pair]:
        for quantities, measured in results_ahead(self._measurements(moment)):
            name, side, reference, base = quantities
            yield _Pair(name, side, reference, base, measured, self._own(moment, measured))

    def _measurements(
        self, moment: Moment
    ) -> Iterator[tuple[tuple[str, Quantity, Quantity, Quantity], Callable[[], Measured]]]:
        """Yield name, side, reference and base of every tensor, and how to measure it."""
        for name in self._all_names(moment):
            sides = self._complete(moment, name)
            if sides is None:
                continue
            side, reference, base = sides
            if not side.is_present and not reference.is_present:
                self.without_gradient.add(name)  # frozen or unused on both sides: equal
                continue
            if _is_discrete(side) and _is_discrete(base):
                self._compare_discrete(moment, name, side, base)
                continue
            other = self._other(moment, name, reference)
            yield (name, *sides), partial(measure, side, base, other=other)

    def _other(self, moment: Moment, name: str, reference: Quantity) -> Quantity | None:
        """Return what is measured against the base beside the parallel run, if anything is."""
        if self._truth is not None:
            return reference
        return None if self._noise is None else self._noise.quantity(moment, name)

    def _own(self, moment: Moment, measured: Measured) -> float | None:
        """Return how far the reference is from the truth, or from its own second run."""
        if measured.other is None:
            return None
        distance = measured.other.relative
        if self._truth is None and moment.kind == Kind.GRAD:
            self.largest_noise = max(self.largest_noise or 0.0, distance)
        return distance

    def _compare_discrete(self, moment: Moment, name: str, side: Quantity, base: Quantity) -> None:
        """Whole numbers and choices are equal, or what differs is counted.

        In fp64 a choice that flips is a mistake. In less precise dtypes near ties may fall either
        way, so there the number of them is told, and not held against the run.
        """
        measured = Measured(count_unequal(side, base))
        exact = self._budget.yardstick is Yardstick.FP64
        row = self._row(moment, name, measured, DISCRETE, 0.0, self._budget.eps)
        row.rel_l2 = measured.total.error / max(measured.total.elements, 1)
        row.eps, row.cosine, row.scale = row.rel_l2 / self._budget.eps, None, None
        row.ok = not exact or measured.total.error == 0.0
        row.budget_eps = 0.0 if exact else None
        if measured.total.error:
            self.notes.append(
                f"{moment}: {measured.total.error:.0f} of {measured.total.elements} values of "
                f"{name} differ"
            )
        self.compared.append(Compared(moment, row, side, base, measured, 0.0 if exact else None))

    def _all_names(self, moment: Moment) -> list[str]:
        names = [*self._reference.names(moment), *self._parallel.names(moment)]
        return list(dict.fromkeys(names))

    def _complete(self, moment: Moment, name: str) -> tuple[Quantity, Quantity, Quantity] | None:
        """Return the parallel quantity, the reference's and the base, or note what is missing."""
        roles = [("parallel run", self._parallel), ("reference", self._reference)]
        if self._truth is not None:
            roles.append(("truth", self._truth))
        if self._noise is not None and moment.kind != Kind.PARAM:
            roles.append(("noise run", self._noise))
        quantities: list[Quantity] = []
        for role, side in roles:
            quantity = side.quantity(moment, name)
            if quantity is None:
                self.names.setdefault(name, 0)
                why = self._unpaired.get(name)
                told = f" ({why})" if why and role == "reference" else ""
                self._skip(name, f"{moment}: not in the {role}{told}")
                return None
            quantities.append(quantity)
            self.names.setdefault(name, math.prod(quantity.shape))
            if quantity.problems:
                self._skip(name, f"{moment}: {'; '.join(quantity.problems)} ({role})")
                return None
        shapes = {quantity.shape for quantity in quantities}
        if len(shapes) > 1:
            told = ", ".join(
                f"{list(quantity.shape)} in the {role}"
                for (role, _), quantity in zip(roles, quantities, strict=True)
            )
            self._skip(name, f"{moment}: shape {told}")
            return None
        return quantities[0], quantities[1], quantities[1 if self._truth is None else 2]

    def _compare_initial(self, moment: Moment) -> None:
        for name in self._all_names(moment):
            sides = self._complete(moment, name)
            if sides is None:
                continue
            side, reference, base = sides
            equal = (self._is_known_equal(side) or are_bitwise_equal(side, reference)) and (
                self._truth is None or are_bitwise_equal(base, reference)
            )
            measured = Measured() if equal else measure(side, reference)
            row = self._row(moment, name, measured, EXACT, 0.0, self._budget.eps)
            row.ok = equal
            if equal:
                row.cosine = row.scale = 1.0
            item = Compared(moment, row, side, reference, measured, 0.0)
            self.compared.append(item)

    def _is_known_equal(self, side: Quantity) -> bool:
        """Whether pairing has seen every piece to be equal to the reference's."""
        pairing = self._parallel.pairing
        return pairing is not None and all(
            (piece.rank, own_name(term.entry)) in pairing.equal
            for piece in side.pieces
            for term in piece.terms
        )

    def _check_reference_replicas(self, moment: Moment, pair: _Pair) -> None:
        """A reference whose own replicas disagree cannot be what a run is held against."""
        reference = pair.reference
        if all(len(pieces) == 1 for pieces in reference.replicas.values()):
            return
        spread = measure(reference, reference).total.relative
        limit = self._budget.tensor(after_step=True, own=pair.own or 0.0)
        if not spread <= (_LOOSE_EPS * self._budget.eps if limit is None else limit):
            self.reference_problems.append(
                f"{moment}: the reference's own replicas of {pair.name} differ by {spread:.1e}"
            )

    def _note_zero_in_theory(self, moment: Moment, pairs: Sequence[_Pair]) -> None:
        own_names = set((self._truth or self._reference).names(moment))
        norms = [pair.measured.total.base for pair in pairs if pair.name in own_names]
        self._global_norm[moment.step] = math.hypot(*norms)
        # A truth is exact enough to tell a small gradient from none; a reference is as exact as its
        # dtype.
        eps = EPS["float64"] if self._truth is not None else self._budget.eps
        limit = eps * self._global_norm[moment.step]
        self._zero_names |= {pair.name for pair in pairs if pair.measured.total.base <= limit}

    def _judge(self, moment: Moment, pairs: Sequence[_Pair]) -> None:
        ordinary = [pair for pair in pairs if pair.name not in self._zero_names]
        others = [pair.own for pair in ordinary if pair.own is not None]
        for pair in pairs:
            is_zero = pair.name in self._zero_names
            if not is_zero:
                self._check_reference_replicas(moment, pair)
            if is_zero and moment.kind == Kind.GRAD:
                item = self._judge_zero(moment, pair)
            else:
                tolerance = None if is_zero else self._tolerance(moment, pair, others)
                if tolerance is not None and not pair.measured.total.relative <= tolerance:
                    tolerance += self._amplified(moment, pair)
                category = ZERO_IN_THEORY if is_zero else ORDINARY
                row = self._row(
                    moment, pair.name, pair.measured, category, tolerance, self._budget.eps
                )
                item = Compared(moment, row, pair.side, pair.base, pair.measured, tolerance)
            self.compared.append(item)
            if moment.kind == Kind.PARAM_AFTER:
                stored = EPS.get(_dtype(pair.side), self._budget.eps)
                norm = pair.measured.total.base
                self._parameter_norm[moment.step, pair.name] = (norm, stored)

    def _judge_zero(self, moment: Moment, pair: _Pair) -> Compared:
        """The absolute rule: the error in eps of the global gradient norm."""
        unit = self._budget.zero_in_theory(self._global_norm[moment.step])
        error = pair.measured.total
        row = self._row(moment, pair.name, pair.measured, ZERO_IN_THEORY, None, self._budget.eps)
        absolute = math.nan if error.nonfinite else error.error
        row.eps = absolute / unit if unit else (0.0 if absolute == 0.0 else math.inf)
        row.budget_eps = 1.0
        row.ok = row.eps <= 1.0
        return Compared(moment, row, pair.side, pair.base, pair.measured, None)

    def _tolerance(self, moment: Moment, pair: _Pair, others: Sequence[float]) -> float | None:
        after = moment.step > min(self._steps) or moment.kind in (UPDATE, Kind.PARAM_AFTER)
        if self._budget.yardstick is Yardstick.FP64:
            after |= moment.kind == Kind.MOMENT
        tolerance = self._budget.tensor(after_step=after, own=pair.own, others=others)
        if tolerance is not None and moment.kind == Kind.GRAD:
            self._gradient_tolerance[moment.step, pair.name] = tolerance
        if tolerance is not None and moment.state == "exp_avg_sq" and not after:
            gradient = self._gradient_tolerance.get((moment.step, pair.name), 0.0)
            tolerance = max(tolerance, SQUARE_FACTOR.value * gradient)
        if tolerance is not None and moment.kind == UPDATE:
            parameter, stored = self._parameter_norm.get((moment.step, pair.name), (0.0, 0.0))
            update = pair.measured.total.base
            tolerance += self._budget.update_rounding(parameter, update, stored)
        return tolerance

    def _amplified(self, moment: Moment, pair: _Pair) -> float:
        """Return what the optimizer may have made of noise within the gradients' budget.

        Only looked at where it matters: it reads gradients and updates once more.
        """
        if moment.kind not in (UPDATE, Kind.PARAM_AFTER) or self._truth is not None:
            return 0.0
        update = self._reference.quantity(Moment.of(moment.step, UPDATE), pair.name)
        steps = [step for step in self._steps if step <= moment.step]
        grads = [self._reference.quantity(Moment.of(s, Kind.GRAD), pair.name) for s in steps]
        present = [grad for grad in grads if grad is not None and grad.is_present]
        if update is None or not present or any(q.problems for q in (update, *present)):
            return 0.0
        noise = amplified_noise(update, present, FP64_TENSOR.value * self._budget.eps)
        return noise / pair.measured.total.base if pair.measured.total.base else 0.0

    def _row(
        self,
        moment: Moment,
        name: str,
        measured: Measured,
        category: str,
        tolerance: float | None,
        eps: float,
    ) -> TensorRow:
        row = tensor_row(moment, name, measured, category, tolerance, eps)
        row.paired_by = self.paired_by(name)
        return row

    def paired_by(self, name: str) -> str:
        """Return how a tensor of the reference was found in the run."""
        pairing = self._parallel.pairing
        return PLACEMENT if pairing is None else pairing.paired_by.get(name, PLACEMENT)

    @property
    def _unpaired(self) -> dict[str, str]:
        return {} if self._parallel.pairing is None else self._parallel.pairing.unpaired

    def _skip(self, name: str, why: str) -> None:
        self.skipped.append({"name": name, "why": why})


def _dtype(quantity: Quantity) -> str:
    return quantity.pieces[0].terms[0].entry.dtype


def _is_discrete(quantity: Quantity) -> bool:
    return not getattr(torch, _dtype(quantity)).is_floating_point
