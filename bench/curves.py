"""Loss curves of training over a mesh, over those of one device: the picture in docs/experts.md.

    python -m bench.curves [--steps 50] [--draw]

Every run starts from the same weights and takes the same batches. In float32 and bfloat16 (master
weights, sums and the parts that RUN.yaml names stay in float32) the mesh trains as the one device
does, up to the order of sums; in bfloat16 the last bit of a score may send a token to another
expert. Writes the losses to docs/moe_curves.json and the picture to docs/moe_curves.svg; ``--draw``
draws what was measured before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench._curve_picture import picture
from paralign.config.load import load_config
from paralign.config.run import RunConfig
from paralign.prove.reference import ReferenceStep
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_data,
    build_pieces,
    build_program,
    init_rule,
    initialise_whole,
    numerics,
)
from paralign.train.optimizer import build_optimizer

ROOT = Path(__file__).parents[1]
# Example -> what is changed. The preset of 8 devices gets the sizes of tests, so that 50 steps take
# minutes on two cores, and leaves out what changes no result.
RUNS: Mapping[str, Sequence[str]] = {
    "pangu_moe_8": (
        "model.preset=tiny",
        "model.num_experts=16",
        "model.top_k=4",
        "tensor.overlap=none",
        "recompute.parts=none",
        "loss.chunks=1",
    ),
    "pangu_moe_pp_fsdp": (),
}
DTYPES = ("float32", "bfloat16")
STEPS = 50
Losses = dict[str, dict[str, list[float]]]  # example -> "float32 mesh" and so on -> losses


def one_device(config: RunConfig, dtype: str, steps: int) -> list[float]:
    """Train on one device."""
    precision = numerics(dtype, config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    rows = config.batch.global_batch // config.mesh.degrees.dp // config.pipeline.num_microbatches
    step = ReferenceStep(model, blueprint, precision, num_rows=rows)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    return _train(config, steps, dict(model.named_parameters()), step, clip, step.update_routers)


def on_mesh(config: RunConfig, dtype: str, steps: int) -> list[float]:
    """Train this rank's part."""
    program = build_program(config, numerics(dtype, config))

    def step(batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        cut = program.shard(batch)
        return program.step(cut), cut.num_global_tokens

    parameters = dict(program.named_parameters())
    return _train(config, steps, parameters, step, program.clip_grad_norm_, program.update_routers)


def _train(
    config: RunConfig,
    steps: int,
    parameters: Mapping[str, torch.nn.Parameter],
    step: Callable[[Mapping[str, Tensor]], tuple[Tensor, int]],
    clip: Callable[[float], Any],
    update_routers: Callable[[], None],
) -> list[float]:
    optimizer = build_optimizer(config.optimizer, parameters.items())
    data = build_data(config)
    losses = []
    for number in range(steps):
        losses.append(float(step(data.global_batch(number))[0]))
        clip(config.optimizer.clip or float("inf"))
        update_routers()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def measure(steps: int) -> Losses:
    """Train every example in every dtype, on one device and on its mesh."""
    found: Losses = {}
    for example in RUNS:
        found[example] = {}
        for dtype in DTYPES:
            found[example] |= both(example, dtype, steps)
            print(f"{example} {dtype}: largest gap {gap(found[example], dtype):.2e}", flush=True)
    return found


def both(example: str, dtype: str, steps: int) -> dict[str, list[float]]:
    """Return the losses of one device and of the mesh."""
    config = load_config(ROOT / "examples" / f"{example}.yaml", RUNS[example])
    alone = one_device(config, dtype, steps)
    world = config.mesh.degrees.world_size
    ranks = run_on_ranks(on_mesh, world, config, dtype, steps, timeout=3000)
    assert all(losses == ranks[0] for losses in ranks)
    return {f"{dtype} one device": alone, f"{dtype} mesh": ranks[0]}


def gap(curves: Mapping[str, Sequence[float]], dtype: str) -> float:
    """Return the largest relative distance of the two losses of a step."""
    pairs = zip(curves[f"{dtype} one device"], curves[f"{dtype} mesh"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def main() -> None:
    """Measure and draw."""
    docs = ROOT / "docs"
    data = docs / "moe_curves.json"
    steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else STEPS
    if "--draw" not in sys.argv:
        data.write_text(json.dumps(measure(steps), indent=1) + "\n")
    losses: Losses = json.loads(data.read_text())
    (docs / "moe_curves.svg").write_text(picture(losses, DTYPES))
    for example, curves in losses.items():
        for dtype in DTYPES:
            last = curves[f"{dtype} one device"][-1]
            print(f"{example} {dtype}: last loss {last:.3f}, largest gap {gap(curves, dtype):.2e}")


if __name__ == "__main__":
    main()
