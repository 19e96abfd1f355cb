"""Cost of recording: a training step that is recorded against the same step that is not.

    python -m bench.record [--rounds 5] [--batch 8] [--seq-len 256] [--folder DIR] [--check]

One process, llama of 13 million parameters in fp32, AdamW. Three sides train the same model from
the same weights on the same batch, in turn, every round in another order: nothing recorded; loss,
norm and gradients; everything. The time of a step includes writing what it recorded. All sides must
end with the same weights, bit for bit. Traces go to memory where there is such a folder, because a
disk's own time would hide that of recording.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench._rounds import Times, median_ratio, median_seconds, turns
from paralign.align import record
from paralign.config.load import load_config
from paralign.config.run import RunConfig
from paralign.loss import count_valid_tokens, token_cross_entropy_sum
from paralign.train.build import build_data, build_pieces, init_rule, initialise_whole

EXAMPLE = Path("examples", "pp_fsdp_cp.yaml")
SIDES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "gradients": ("loss", "norm", "grads"),
    "everything": (
        "loss",
        "norm",
        "params",
        "grads",
        "optimizer",
        "inputs",
        "outputs",
        "output_grads",
    ),
}
TARGETS = {"gradients": 1.10, "everything": 1.60}
LEAST_SECONDS = 0.5
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Step times of each round, and what the recordings hold."""

    rounds: list[Times]
    cpu: list[Times]
    """Processor time of the same steps, which moves less on a machine that does other work."""
    num_bytes: dict[str, int]
    same_weights: bool
    """Whether all sides ended with the same weights, bit for bit."""


def measure(config: RunConfig, rounds: int, folder: Path | None = None) -> Cost:
    """Train and record ``rounds`` steps on every side, into temporary folders in ``folder``."""
    models = {side: _model(config) for side in SIDES}
    optimizers = {
        side: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for side, model in models.items()
    }
    data = build_data(config)
    times: list[Times] = []
    cpu: list[Times] = []
    num_bytes: dict[str, int] = {}
    for side in SIDES:  # warm up; the optimizer makes its state
        _step(models[side], optimizers[side], data.global_batch(0), None)
    for number in range(rounds):
        taken: Times = {}
        used: Times = {}
        batch = data.global_batch(number + 1)
        for side in turns(list(SIDES), number):
            with tempfile.TemporaryDirectory(prefix="paralign-bench-", dir=folder) as trace:
                model, optimizer, what = models[side], optimizers[side], SIDES[side]
                context: Any = nullcontext()
                if what:
                    context = record(trace, model, optimizer=optimizer, steps=1, what=what)
                with context as recorder:
                    began, used_before = time.perf_counter(), time.process_time()
                    _step(model, optimizer, batch, recorder)
                    taken[side] = time.perf_counter() - began
                    used[side] = time.process_time() - used_before
                num_bytes[side] = sum(path.stat().st_size for path in Path(trace).iterdir())
        times.append(taken)
        cpu.append(used)
    weights = [list(model.parameters()) for model in models.values()]
    same = all(
        torch.equal(first, other)
        for others in weights[1:]
        for first, other in zip(weights[0], others, strict=True)
    )
    return Cost(rounds=times, cpu=cpu, num_bytes=num_bytes, same_weights=same)


def problems(cost: Cost) -> list[str]:
    """Return which targets are missed."""
    found = []
    if not cost.same_weights:
        found.append("a recorded run ended with other weights")
    seconds = median_seconds(cost.rounds, "plain")
    if not seconds >= LEAST_SECONDS:
        found.append(f"a step takes {seconds:.2f} s, less than {LEAST_SECONDS} s: raise --batch")
    for side, target in TARGETS.items():
        ratio = median_ratio(cost.rounds, side, "plain")
        if not ratio < target:
            found.append(f"recording {side} takes {ratio:.2f} x of a step, target {target:.2f}")
    return found


def _model(config: RunConfig) -> nn.Module:
    model, blueprint = build_pieces(config, torch.float32)
    return initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], recorder: Any
) -> None:
    positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    tokens = int(count_valid_tokens(batch["labels"]))
    loss = token_cross_entropy_sum(model(batch["tokens"], positions), batch["labels"]) / tokens
    torch.autograd.backward(loss)
    if recorder is not None:
        recorder.loss(loss, tokens=tokens, reduction="mean", scope="global")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=MEMORY if MEMORY.is_dir() else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args(arguments)
    overrides = [
        "model.preset=small",
        f"batch.global_batch={options.batch}",
        f"batch.seq_len={options.seq_len}",
    ]
    cost = measure(load_config(EXAMPLE, overrides), options.rounds, options.folder)
    print("side              median     ratio    target   processor     ratio       written")
    for side in SIDES:
        target = f"{TARGETS[side]:.2f}" if side in TARGETS else ""
        ratio, of_cpu = (median_ratio(times, side, "plain") for times in (cost.rounds, cost.cpu))
        print(
            f"{side:12}   {median_seconds(cost.rounds, side):7.3f} s   "
            f"{ratio:7.3f}   {target:>7}   {median_seconds(cost.cpu, side):7.3f} s   {of_cpu:7.3f}"
            f"   {cost.num_bytes[side] / 2**20:7.1f} MiB"
        )
    print(f"same weights at the end: {'yes, bit for bit' if cost.same_weights else 'NO'}")
    found = problems(cost)
    print("\n".join(found))
    return 1 if options.check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
