"""Peak memory and time of a step with and without recomputing, under every schedule that allows it.

    python -m bench.recompute [--rounds 3] [--check]

Four ranks, pp=2 x dp_shard=2, a llama of 13 million parameters and a pangu_moe of 12 million, 8
micro-batches, fp32. For each choice a step runs in a world of its own; what it adds to the resident
memory of rank 0 at its peak is read from the system, so everything counts: activations, gathered
parameters, buffers. Linux only. ``--check`` exits with 1 unless each choice takes less memory than
none.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._rounds import Times
from paralign.config.load import resolve_config
from paralign.config.run import RunConfig
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
PARTS = ["*_norm", "attention.project", "*.activate"]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"name": "llama", "preset": "small"}, PARTS),
    "pangu_moe": (
        {
            **{"name": "pangu_moe", "preset": "tiny", "vocab_size": 1000},
            **{"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "num_heads": 4},
            **{"q_lora_rank": 64, "kv_lora_rank": 64},
            **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
            **{"num_experts": 16, "top_k": 8, "expert_hidden_size": 256, "shared_hidden_size": 256},
        },
        [*PARTS, "ffn.experts.permute"],
    ),
}
SETTINGS: dict[str, Any] = {
    "mesh": {"pp": 2, "dp_shard": 2},
    "batch": {"global_batch": 16, "seq_len": 512},
}


def measure(config: RunConfig) -> Times:
    """Return seconds of a step and MiB that it adds at its peak; runs on every rank."""
    program = build_program(config, numerics("float32", config))
    batch = program.shard(build_data(config).global_batch(0))
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    begin = time.perf_counter()
    program.step(batch)
    return {"seconds": time.perf_counter() - begin, "MiB": _memory("VmHWM") - before}


def _memory(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def compare(settings: Mapping[str, Any], parts: Sequence[str], rounds: int) -> dict[str, Times]:
    """Return the medians of every choice, measured in turns."""
    choices = {"none": "none", "parts": parts, "block": "block"}
    found: dict[str, list[Times]] = {name: [] for name in choices}
    for _ in range(rounds):
        for name, chosen in choices.items():
            config = resolve_config({**settings, "recompute": {"parts": chosen}})
            found[name].append(run_on_ranks(measure, 4, config, timeout=300)[0])
    return {
        name: {key: statistics.median(t[key] for t in times) for key in ("MiB", "seconds")}
        for name, times in found.items()
    }


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 unless memory falls")
    options = parser.parse_args()
    # Memory of this size and above goes back to the system when it is freed. glibc before 2.38 does
    # not give what was freed to an aligned request of the same size, and torch's all are.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)
    print("model      schedule           recompute   peak of a step   of none   time of none")
    falls = True
    for family, (model, parts) in MODELS.items():
        for schedule in SCHEDULES:
            pipeline = {"schedule": schedule, "num_microbatches": 8}
            settings = {**SETTINGS, "model": model, "pipeline": pipeline}
            medians = compare(settings, parts, options.rounds)
            none = medians["none"]
            for name, found in medians.items():
                share, slower = found["MiB"] / none["MiB"], found["seconds"] / none["seconds"]
                falls &= name == "none" or share < 1
                print(
                    f"{family:10} {schedule:18} {name:11} {found['MiB']:10.0f} MiB   {share:7.2f}"
                    f"   {slower:12.2f}",
                    flush=True,
                )
    return 1 if options.check and not falls else 0


if __name__ == "__main__":
    raise SystemExit(main())
