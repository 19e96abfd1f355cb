"""A training step of paralign against the same step composed by hand from torch's primitives.

    python -m bench.step [--rounds 9] [--schedule 1F1B GPipe] [--hidden 256] [--check]

Llama over pipeline 2 x data 2 x context 2 on 8 local ranks, blocks and root wrapped, Ulysses, fp32,
one thread for each rank. Both sides train in one world on the same batches, from the same weights,
and must report the same loss and norm. What each sends is counted on every rank; then steps are
timed in turn, every round in another order. A second hand-composed step, the twin, is timed too:
its ratio says what two equal steps differ by on this machine now.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from bench._rounds import median_ratio, median_seconds
from bench._step_ranks import Case, Measured, measure
from bench._traffic import Traffic
from paralign.models.llama.presets import LlamaConfig
from paralign.testing import run_on_ranks

TARGET = 1.10
# fp32: the two sides add up the losses of micro-batches in different orders.
VALUE_TOLERANCE = 1e-5
# Token count and fingerprint of the batch, three float64 numbers, ride in the all-reduce of
# paralign's loss: by them it knows that all ranks trained on one batch.
RIDERS_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of traffic, summed over all ranks: (calls, bytes) of each side."""

    kind: str
    hand: tuple[int, int]
    paralign: tuple[int, int]


def value_problems(ranks: Sequence[Measured]) -> list[str]:
    """Return where the two sides do not train alike; then their times say nothing."""
    problems = []
    for rank, measured in enumerate(ranks):
        pairs = zip(measured.values["hand"], measured.values["paralign"], strict=True)
        for number, (hand, ours) in enumerate(pairs):
            for name, a, b in zip(("loss", "norm"), hand, ours, strict=True):
                if not abs(a - b) <= VALUE_TOLERANCE * abs(a):
                    problems.append(f"rank {rank}, step {number}: {name} {b} instead of {a}")
    return problems


def traffic_problems(hand: Traffic, paralign: Traffic, rank: int) -> list[str]:
    """Return what a rank of paralign sends more or less than by hand, beyond the loss's riders."""
    problems = []
    for kind in sorted({*hand, *paralign}):
        calls, num_bytes = hand.get(kind, (0, 0))
        if kind == "all-reduce":
            num_bytes += RIDERS_BYTES
        if paralign.get(kind, (0, 0)) != (calls, num_bytes):
            found = paralign.get(kind, (0, 0))
            problems.append(
                f"rank {rank}: {kind}: {found[0]} calls of {found[1]} bytes instead of {calls} "
                f"calls of {num_bytes} bytes"
            )
    return problems


def total_traffic(ranks: Sequence[Measured]) -> list[Row]:
    """Add up what all ranks send, kind by kind."""

    def total(side: str, kind: str) -> tuple[int, int]:
        parts = [rank.traffic[side].get(kind, (0, 0)) for rank in ranks]
        return sum(calls for calls, _ in parts), sum(num_bytes for _, num_bytes in parts)

    kinds = {kind for rank in ranks for side in rank.traffic.values() for kind in side}
    return [
        Row(kind=kind, hand=total("hand", kind), paralign=total("paralign", kind))
        for kind in sorted(kinds)
    ]


def report(case: Case, ranks: Sequence[Measured]) -> bool:
    """Print both tables of one schedule; return whether all targets are met."""
    print(f"\n{case.schedule}, M={case.num_microbatches}, {case.describe()}")
    print("one step, all ranks   calls by hand   paralign        bytes by hand        paralign")
    for row in total_traffic(ranks):
        print(
            f"{row.kind:20}  {row.hand[0]:13}   {row.paralign[0]:8}   "
            f"{row.hand[1]:18,}   {row.paralign[1]:13,}"
        )
    problems = value_problems(ranks)
    for number, rank in enumerate(ranks):
        problems += traffic_problems(rank.traffic["hand"], rank.traffic["paralign"], number)
    if problems:
        print("\n".join(problems))
    else:
        print(
            f"the same on every rank, but for {RIDERS_BYTES} bytes a rank: the batch's fingerprint "
            "and token count ride in the loss's all-reduce"
        )
    seconds = ranks[0].seconds
    if not seconds:
        return not problems
    print("round   by hand     paralign   ratio    twin/hand")
    for number, times in enumerate(seconds):
        print(
            f"{number:5}   {times['hand']:7.4f} s   {times['paralign']:7.4f} s   "
            f"{times['paralign'] / times['hand']:5.3f}    {times['twin'] / times['hand']:5.3f}"
        )
    ratio = median_ratio(seconds, "paralign", "hand")
    hand, ours = (median_seconds(seconds, side) for side in ("hand", "paralign"))
    print(
        f"median  {hand:7.4f} s   {ours:7.4f} s   {ratio:5.3f}    "
        f"{median_ratio(seconds, 'twin', 'hand'):5.3f}   (target {TARGET:.2f})"
    )
    cpu = [
        {side: sum(rank.cpu[n][side] for rank in ranks) for side in t}
        for n, t in enumerate(seconds)
    ]
    print(
        "processor time of all ranks, median ratio: "
        f"{median_ratio(cpu, 'paralign', 'hand'):.3f}, twin {median_ratio(cpu, 'twin', 'hand'):.3f}"
    )
    return not problems and ratio <= TARGET


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; 0: count only")
    parser.add_argument(
        "--schedule", nargs="+", default=["1F1B", "GPipe"], choices=["1F1B", "GPipe"]
    )
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args()
    config = LlamaConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=8 * options.hidden // 3 // 32 * 32,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=256,
    )
    passed = []
    for schedule in options.schedule:
        case = Case(
            config=config,
            degrees=(2, 2, 2),
            schedule=schedule,
            num_microbatches=options.microbatches,
            global_batch=options.global_batch,
            seq_len=options.seq_len,
        )
        ranks = run_on_ranks(measure, case.world_size, case, options.rounds, timeout=1800)
        passed.append(report(case, ranks))
    return 1 if options.check and not all(passed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
