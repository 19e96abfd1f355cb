"""What the run under test was fed at a step, looked up by content in the reference's batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from paralign.align.alike_rows import find_all_tokens
from paralign.align.explain.context import Context
from paralign.align.token_map import (
    Held,
    Inputs,
    Key,
    TokenTable,
    step_inputs,
    step_samples,
    token_table,
)


@dataclass(frozen=True)
class Fed:
    """What the parallel run was fed at a step, and where that is in the global batch."""

    table: TokenTable
    inputs: Mapping[Key, Inputs]
    held: Mapping[Key, Held]

    def samples(self, key: Key) -> tuple[int, ...]:
        """Return the global rows of a micro-batch, those that were found."""
        return tuple(
            row
            for block in self.held[key].blocks
            for span in block.rows
            for row in range(*span.global_)
        )

    def places(self, key: Key) -> tuple[int, ...]:
        """Return the global positions of a micro-batch's first row."""
        blocks = self.held[key].blocks
        if not blocks:
            return ()
        return tuple(at for span in blocks[0].positions for at in range(*span.global_))

    def candidates(self, key: Key) -> list[set[int]]:
        """Return per row of a micro-batch every global row that reads alike, there or elsewhere."""
        given = self.inputs[key]["tokens"]
        length = given.shape[1]
        found: list[set[int]] = [set() for _ in range(len(given))]
        if length <= self.table.shape[1]:
            windows = self.table.tokens.unfold(1, length, 1)
            for row, content in enumerate(given):
                found[row] |= _rows((windows == content).all(2).any(1))
        for block in self.held[key].blocks:
            inside = [at for span in block.positions for at in range(*span.local)]
            places = [at for span in block.positions for at in range(*span.global_)]
            for row in (row for span in block.rows for row in range(*span.local)):
                found[row] |= _rows((self.table.tokens[:, places] == given[row, inside]).all(1))
        return found

    def by_rank(self, read: Callable[[Key], tuple[int, ...]]) -> dict[int, tuple[object, ...]]:
        """Return what ``read`` says of all micro-batches of each rank."""
        found: dict[int, tuple[object, ...]] = {}
        for key in sorted(self.held):
            found[key[0]] = (*found.get(key[0], ()), read(key))
        return found

    def may_share(self, one: int, other: int) -> bool:
        """Whether two ranks' rows may be the same samples: short slices of rows read alike."""
        numbers = [{n for rank, n in self.held if rank == which} for which in (one, other)]
        return numbers[0] == numbers[1] and all(
            len(ours) == len(theirs) and all(a & b for a, b in zip(ours, theirs, strict=True))
            for n in numbers[0]
            for ours, theirs in [(self.candidates((one, n)), self.candidates((other, n)))]
        )


def fed_at(context: Context, step: int) -> Fed | None:
    """Look the parallel run's inputs up in the reference's; None where too little was recorded."""
    reference, trace = context.reference.reader, context.trace
    table = token_table(step_inputs(reference, step), step_samples(reference, step))
    inputs = {key: given for key, given in step_inputs(trace, step).items() if "tokens" in given}
    if table is None or not inputs:
        return None
    # Told positions are left out: they are judged against where the tokens really are. Told
    # samples only decide between rows that are equal here: in their padding, for example.
    tokens = {key: {"tokens": given["tokens"]} for key, given in inputs.items()}
    held = find_all_tokens(trace, tokens, table, step_samples(trace, step))
    return Fed(table, inputs, held)


def _rows(chosen: Tensor) -> set[int]:
    return set(chosen.nonzero().flatten().tolist())
