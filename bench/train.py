"""The loop of ``paralign train`` against one written by hand on torch's primitives.

    python -m bench.train [--rounds 9] [--check]

Three parts, each with both sides in turn in one run:

1. Tokens a second of llama over pipeline 2 x FSDP 2 x context 2 on 8 local ranks, fp32, one thread
   a rank: data, step, clipping, AdamW. The hand-written loop has the same plan, takes the same
   batches and must report the same losses and send the same. One process that does the same work is
   measured after it, with as many threads as torch likes.
2. AdamW over 500 small parameters on two ranks: DTensor for DTensor, and on local shards.
3. How long a save of 128 MB a rank on two ranks keeps training waiting: until it is on disk, and
   in the background.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench._rounds import Times, median_ratio, median_seconds
from bench._train_ranks import Trained, optimizer_steps, saves, train_alone, train_both
from bench.step import RIDERS_BYTES, VALUE_TOLERANCE, traffic_problems
from paralign.config.load import load_config
from paralign.config.run import RunConfig
from paralign.testing import run_on_ranks

ROOT = Path(__file__).parents[1]
MESH = "mesh={pp: 2, dp_shard: 2, cp: 2}"
# What AdamW does by default, as a loop by hand has it.
SETTINGS = (
    "model={name: llama, num_layers: 4, hidden_size: 256, ffn_hidden_size: 512, num_heads: 8,"
    " num_kv_heads: 4, vocab_size: 256}",
    "pipeline={schedule: 1F1B, num_microbatches: 4}",
    "batch={global_batch: 16, seq_len: 256}",
    "optimizer={lr: 3.0e-4, betas: [0.9, 0.999], weight_decay: 0.01, clip: 1.0}",
    "schedule={name: constant}",
)
TARGETS = {"tokens": 0.92, "optimizer": 2.0, "save": 0.10}


def config_of(folder: Path, mesh: str = MESH) -> RunConfig:
    """Return the run that both loops train."""
    settings = [*SETTINGS, mesh, f"train.dir={folder}"]
    return load_config(ROOT / "examples" / "train_llama.yaml", settings)


def problems(ranks: Sequence[Trained]) -> list[str]:
    """Return where the two loops do not train or send alike; then their times say nothing."""
    found = []
    for number, rank in enumerate(ranks):
        for step, (a, b) in enumerate(
            zip(rank.losses["hand"], rank.losses["paralign"], strict=True)
        ):
            if not abs(a - b) <= VALUE_TOLERANCE * abs(a):
                found.append(f"rank {number}, step {step}: loss {b} instead of {a}")
        found += traffic_problems(rank.traffic["hand"], rank.traffic["paralign"], number)
    return found


def report_loops(ranks: Sequence[Trained], alone: Trained, config: RunConfig) -> float:
    """Print tokens a second; return paralign's by those of the loop by hand."""
    tokens = config.batch.global_batch * config.batch.seq_len
    seconds = ranks[0].seconds
    print("round   by hand, tokens/s   paralign, tokens/s   ratio")
    for number, times in enumerate(seconds):
        print(
            f"{number:5}   {tokens / times['hand']:17,.0f}   "
            f"{tokens / times['paralign']:18,.0f}   {times['hand'] / times['paralign']:5.3f}"
        )
    ratio = median_ratio(seconds, "hand", "paralign")
    cpu = [
        {side: sum(rank.cpu[n][side] for rank in ranks) for side in times}
        for n, times in enumerate(seconds)
    ]
    print(
        f"median  {tokens / median_seconds(seconds, 'hand'):17,.0f}   "
        f"{tokens / median_seconds(seconds, 'paralign'):18,.0f}   {ratio:5.3f}   "
        f"(target {TARGETS['tokens']}; by processor time "
        f"{median_ratio(cpu, 'hand', 'paralign'):.3f})"
    )
    one = median_seconds(alone.seconds, "alone")
    print(f"one process, the same work: {tokens / one:,.0f} tokens/s")
    return ratio


def report_pair(title: str, rounds: Sequence[Times], side: str, base: str, target: str) -> float:
    """Print one part's medians; return how often ``side`` fits into ``base``."""
    ratio = median_ratio(rounds, base, side)
    print(
        f"{title}: {base} {1e3 * median_seconds(rounds, base):.1f} ms, "
        f"{side} {1e3 * median_seconds(rounds, side):.1f} ms; {ratio:.1f} x ({target})"
    )
    return ratio


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args()
    rounds = options.rounds
    with tempfile.TemporaryDirectory(prefix="paralign-bench-") as name:
        folder = Path(name)
        config = config_of(folder / "mesh")
        ranks = run_on_ranks(train_both, 8, config, rounds, timeout=900)
        [alone] = run_on_ranks(
            train_alone, 1, config_of(folder / "alone", "mesh={}"), rounds, timeout=900
        )
        wrong = problems(ranks)
        print("\n".join(wrong) or f"losses and traffic are the same, but for {RIDERS_BYTES} bytes")
        tokens = report_loops(ranks, alone, config)
        steps = run_on_ranks(optimizer_steps, 2, 500, (16, 16), rounds, timeout=900)[0]
        quicker = report_pair(
            "AdamW, 500 parameters", steps, "shards", "dtensor", f"target {TARGETS['optimizer']}"
        )
        times = run_on_ranks(saves, 2, folder / "saves", 2**27, rounds, timeout=900)[0]
        wait = report_pair(
            "a save", times, "background", "waiting", f"target {1 / TARGETS['save']:.0f}"
        )
    met = tokens >= TARGETS["tokens"] and quicker >= TARGETS["optimizer"]
    met = met and wait >= 1 / TARGETS["save"] and not wrong
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
