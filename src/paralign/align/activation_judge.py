"""Compare inputs, module outputs and output gradients of two runs, in causal order.

They tell where two runs part; whether they are one training run, loss and gradients of parameters
tell. So an output that differs in a step in which those agree is another way to write the same
(a sum that a parent finishes, a slice of another order): it is listed, not held against the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paralign.align.activation_pair import Found, StepOutputs
from paralign.align.alike_rows import find_all_tokens
from paralign.align.budget import Budget
from paralign.align.judge import Compared
from paralign.align.measure import Measured, measure
from paralign.align.pair import Moment, Quantity
from paralign.align.rows import tensor_row
from paralign.align.tensor_entry import Kind
from paralign.align.token_map import (
    Inputs,
    Key,
    TokenTable,
    step_inputs,
    step_samples,
    token_table,
    told_inputs,
)
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import EXACT, ORDINARY, ZERO_IN_THEORY

PAIRED_BY = "content"
"""Tokens are found by their content, so everything that they place is."""


@dataclass
class _Run:
    """One run at one step."""

    trace: TraceReader
    role: str
    inputs: Mapping[Key, Inputs]
    outputs: StepOutputs
    told: StepOutputs
    tokens: Tensor
    """All rows, the same for every run."""
    lost: Mapping[Key, int]
    """Rows per micro-batch that the other run has not."""


@dataclass
class ActivationJudge:
    """Measures and judges what passed through the modules of both runs.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        truth: An fp64 run of the same weights and data, or None.
        budget: The tolerances.
        steps: The steps that both sides recorded.
    """

    reference: TraceReader
    parallel: TraceReader
    truth: TraceReader | None
    budget: Budget
    steps: Sequence[int]
    noise: TraceReader | None = None
    """A second run of the reference, or None."""
    rename: Callable[[int, str], str] | None = None
    """Rank and module of the parallel run -> the reference's name of it; None: it has the same."""
    compared: list[Compared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    other_data: str | None = None
    """Why the runs did not learn from the same data, if most of it differs."""

    def run(self, agreed: Mapping[int, bool]) -> None:
        """Compare everything; fills the public attributes.

        Args:
            agreed: Per step whether loss and gradients were compared and agree.
        """
        for step in self.steps:
            runs = self._runs(step)
            if runs is None:
                continue
            items = [*self._inputs(step, runs), *self._tensors(step, runs)]
            if agreed.get(step):
                self._excuse(step, items)
            self.compared += items
        self._note_unseen()

    def outputs(self, step: int) -> tuple[StepOutputs, Tensor] | None:
        """Return the parallel run's module outputs and the global batch's tokens.

        None if outputs or tokens were not recorded.
        """
        runs = self._runs(step)
        if runs is None or not runs[0].outputs.names(Kind.OUTPUT):
            return None
        return runs[0].outputs, runs[0].tokens

    def _runs(self, step: int) -> list[_Run] | None:
        """Return parallel run, reference and truth, with what each holds of the same table."""
        sides = [("parallel run", self.parallel), ("reference", self.reference)]
        if self.truth is not None:
            sides.append(("truth", self.truth))
        elif self.noise is not None:
            sides.append(("second run of the reference", self.noise))
        fed = {role: step_inputs(trace, step) for role, trace in sides}
        asked = {role for role, trace in sides if "inputs" in trace.facts.what}
        without = [role for role, _ in sides if not fed[role]]
        if without:
            if asked:
                self.notes.append(
                    f"step {step}: no tokens were recorded in the {' and the '.join(without)}, so "
                    "inputs and module outputs were not compared. Tell them with rec.inputs()"
                )
            return None
        samples = {role: step_samples(trace, step) for role, trace in sides}
        tables = [token_table(fed[role], samples[role]) for role in ("reference", "parallel run")]
        whole = [table for table in tables if table is not None]
        if not whole:
            return None
        length = max(table.shape[1] for table in whole)
        table = next(table for table in whole if table.shape[1] == length)
        return [self._run(role, trace, step, table, fed[role]) for role, trace in sides]

    def _run(
        self,
        role: str,
        trace: TraceReader,
        step: int,
        table: TokenTable,
        fed: Mapping[Key, Inputs],
    ) -> _Run:
        samples = step_samples(trace, step)
        rename = self.rename if trace is self.parallel else None
        held = find_all_tokens(trace, fed, table, samples)
        told = find_all_tokens(trace, told_inputs(trace, step), table, samples)
        return _Run(
            trace,
            role,
            fed,
            StepOutputs(trace, step, table.shape, held, rename),
            StepOutputs(trace, step, table.shape, told),
            table.tokens,
            {key: len(place.lost) for key, place in held.items() if place.lost},
        )

    def _inputs(self, step: int, runs: Sequence[_Run]) -> Iterator[Compared]:
        parallel, reference = runs[0], runs[1]
        moment = Moment.of(step, Kind.INPUT)
        for name in reference.told.names(Kind.INPUT):
            if name not in parallel.told.names(Kind.INPUT):
                self.notes.append(f"step {step}: {name} were not recorded in the parallel run")
                continue
            side = parallel.told.quantity(Kind.INPUT, name, ())
            base = reference.told.quantity(Kind.INPUT, name, ())
            if isinstance(side, str) or isinstance(base, str):
                self.notes.append(f"step {step}: {name} were not compared: {side}")
                continue
            if name == "tokens":
                yield self._tokens(moment, step, parallel, reference, side, base)
            elif base.uncovered == 0:
                measured = measure(side.quantity, base.quantity)
                yield self._item(moment, name, side.quantity, base.quantity, measured, 0.0, EXACT)

    def _tokens(
        self, moment: Moment, step: int, parallel: _Run, reference: _Run, side: Found, base: Found
    ) -> Compared:
        """Judge which tokens there are; what is found by content has the right values."""
        rows = sum(int(given["tokens"].shape[0]) for given in parallel.inputs.values())
        lost = sum(parallel.lost.values())
        cells = math.prod(base.quantity.shape)
        share = max(lost / rows if rows else 0.0, side.uncovered / cells if cells else 0.0)
        item = self._item(moment, "tokens", side.quantity, base.quantity, Measured(), 0.0, EXACT)
        item.row.rel_l2 = share
        item.row.eps = share / self.budget.eps
        item.row.ok = share == 0.0 and not reference.lost
        item.row.ranks_off = sorted({rank for rank, _ in parallel.lost})
        item.row.share_beyond = share
        if share > 0.5 or reference.lost:
            self.other_data = (
                f"the runs were fed different data: at step {step} {lost} of {rows} rows of the "
                f"parallel run are not in the reference, and {side.uncovered} of {cells} tokens of "
                "the reference are nowhere in the parallel run"
            )
        return item

    def _tensors(self, step: int, runs: Sequence[_Run]) -> Iterator[Compared]:
        for kind in (Kind.OUTPUT, Kind.OUTPUT_GRAD):
            found = list(self._pairs(step, kind, runs))
            largest = max((measured.total.base for _, _, _, measured, _, _ in found), default=0.0)
            owns = [own for *_, own, _ in found if own is not None]
            after = step > min(self.steps)
            for name, side, base, measured, own, is_guess in found:
                category, tolerance = ORDINARY, None
                if measured.total.base <= self.budget.eps * largest:
                    category = ZERO_IN_THEORY  # a gradient of rounding noise, of a mask
                elif not is_guess:
                    tolerance = self.budget.tensor(after_step=after, own=own, others=owns)
                yield self._item(
                    Moment.of(step, kind), name, side, base, measured, tolerance, category
                )

    def _pairs(
        self, step: int, kind: str, runs: Sequence[_Run]
    ) -> Iterator[tuple[str, Quantity, Quantity, Measured, float | None, bool]]:
        reference = runs[1].outputs
        theirs = set(runs[0].outputs.names(kind))
        left: dict[str, list[str]] = {}
        names = reference.names(kind)
        for name in sorted(theirs - set(names)):
            left.setdefault("not in the reference", []).append(name)
        for name in names:
            why = "not in the parallel run" if name not in theirs else None
            prefer = _agreed_dims(run.outputs.possible_dims(kind, name) for run in runs)
            rest = reference.rest_of(kind, name, prefer)
            if reference.is_counted(kind, name):
                why = why or "its rows are chosen by a router, so they were counted only"
            elif rest is None:
                why = why or "it has no dims for rows and positions"
            found = (
                []
                if why
                else [run.outputs.quantity(kind, name, rest or (), prefer) for run in runs]
            )
            why = why or next((item for item in found if isinstance(item, str)), None)
            placed = [item for item in found if isinstance(item, Found)]
            if why is None and any(item.uncovered for item in placed[1:]):
                why = "the reference does not hold all of it"
            if why is not None:
                left.setdefault(why, []).append(name)
                continue
            side, ours, other = placed[0], placed[1], placed[-1]
            base = ours if self.truth is None else other
            beside = ours if base is other else other
            measured = measure(
                side.quantity, base.quantity, other=beside.quantity if len(runs) > 2 else None
            )
            own = None if measured.other is None else measured.other.relative
            guess = any(item.is_guess for item in placed)
            yield name, side.quantity, base.quantity, measured, own, guess
        for why, found_names in left.items():
            self.notes.append(
                f"step {step}: {len(found_names)} {kind}s were not compared, first "
                f"{found_names[0]}: {why}"
            )

    def _item(
        self,
        moment: Moment,
        name: str,
        side: Quantity,
        base: Quantity,
        measured: Measured,
        tolerance: float | None,
        category: str,
    ) -> Compared:
        row = tensor_row(moment, name, measured, category, tolerance, self.budget.eps)
        row.paired_by = PAIRED_BY
        return Compared(moment, row, side, base, measured, tolerance)

    def _excuse(self, step: int, items: Sequence[Compared]) -> None:
        """List without gate what differs although it has no effect."""
        differing = [item for item in items if not item.row.ok and item.row.name != "tokens"]
        for item in differing:
            item.row.budget_eps, item.row.ok, item.tolerance = None, True, None
        if differing:
            first = differing[0].row
            self.notes.append(
                f"step {step}: {len(differing)} inputs and module outputs differ, first "
                f"{first.kind} {first.name}, though loss and every gradient agree: the runs write "
                "them differently"
            )

    def _note_unseen(self) -> None:
        for trace in (self.reference, self.parallel):
            said = {(item["name"], item["why"]) for index in trace.ranks for item in index.unseen}
            self.notes += [f"{name} was not seen: {why}" for name, why in sorted(said)]


def _agreed_dims(possible: Iterable[Sequence[tuple[int, int]]]) -> tuple[int, int] | None:
    """Return the dims that count tokens in every run: sizes that agree by chance differ in one."""
    first, *others = possible
    return next((dims for dims in first if all(dims in other for other in others)), None)
