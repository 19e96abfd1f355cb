"""The loss on text that is held out, over any mesh, without a trace in the training run."""

from __future__ import annotations

import math

from paralign.data.source import HeldOut
from paralign.program import Program


def validate(program: Program, held_out: HeldOut) -> tuple[float, int]:
    """Return the cross entropy of all held-out tokens, and how many they are.

    Every token weighs the same, whatever batch it is in.

    Comm:
        Per batch what :meth:`paralign.program.Program.evaluate` does.
    """
    sums, num_tokens = [], 0
    for number in range(held_out.num_batches):
        batch = program.shard(held_out.global_batch(number))
        sums.append(float(program.evaluate(batch, num_tokens=1)))
        num_tokens += batch.num_global_tokens
    return math.fsum(sums) / num_tokens, num_tokens
