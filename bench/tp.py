"""Bytes that one rank of tp and cp sends in a step, counted, against what has to move.

    python -m bench.tp

What has to move is computed from the model's sizes alone. The stream enters and leaves attention
and feed-forward, forward and backward: of T tokens of width H each of n ranks sends
``(n - 1) / n T H`` numbers a time, as the pieces of a gather or of a sum. Latent attention
takes in its latents instead
of the stream. Embedding and head cross once each way. The gradients of weights that all ranks hold
are summed once. Ulysses exchanges q, k, v and the output, ``(n - 1) / n`` of each, both ways.
Nothing is timed: bytes do not depend on the machine.
"""

from __future__ import annotations

from typing import Any

import torch

from bench._traffic import TrafficCounter
from paralign.config.run import RunConfig
from paralign.declaration import declare
from paralign.mesh import build_mesh
from paralign.parallel.data import Precision
from paralign.planning import resolve_plan
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_data,
    build_pieces,
    build_plans,
    build_program,
    build_tensor,
    numerics,
)

NUMBER = 4  # bytes of a float32
RANKS = 4
ROWS, SEQ_LEN = 2, 256

LLAMA = {"name": "llama", "preset": "tiny", "num_kv_heads": 4}
PANGU = {"name": "pangu_moe", "preset": "tiny_dense"}
KEPT = {"reshard_after_forward": False}  # weights are gathered once
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama, tp with sequence parallel", {"model": LLAMA, "mesh": {"tp": RANKS}}),
    (
        "llama, the same, in chunks",
        {"model": LLAMA, "mesh": {"tp": RANKS}, "tensor": {"overlap": "chunks"}},
    ),
    (
        "llama, tp without sequence parallel",
        {"model": LLAMA, "mesh": {"tp": RANKS}, "tensor": {"sequence_parallel": False}},
    ),
    ("pangu, tp with sequence parallel", {"model": PANGU, "mesh": {"tp": RANKS}}),
    (
        "pangu, tp without sequence parallel",
        {"model": PANGU, "mesh": {"tp": RANKS}, "tensor": {"sequence_parallel": False}},
    ),
    ("llama, cp (Ulysses)", {"model": LLAMA, "mesh": {"cp": RANKS}, "fsdp": KEPT}),
    ("pangu, cp (Ulysses)", {"model": PANGU, "mesh": {"cp": RANKS}, "fsdp": KEPT}),
]


def config_of(sections: dict[str, Any]) -> RunConfig:
    """Return one micro-batch of the case."""
    return RunConfig.model_validate(
        {
            "pipeline": {"schedule": "GPipe", "num_microbatches": 1},
            "batch": {"global_batch": ROWS, "seq_len": SEQ_LEN},
            "align": {"dtype": "float32"},
            **sections,
        }
    )


def count(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return what this rank sends in the second step."""
    mesh = build_mesh(config.mesh.degrees)
    program = build_program(config, numerics("float32", config), mesh=mesh)
    batch = program.shard(build_data(config).global_batch(0))
    program.step(batch)
    with TrafficCounter() as counter:
        program.step(batch)
    traffic: dict[str, tuple[int, int]] = counter.traffic()
    return traffic


def moved(traffic: dict[str, tuple[int, int]]) -> int:
    """Add up; a sum of whole tensors is the scatter and the gather that it is made of."""
    total = 0.0
    for kind, (_, num_bytes) in traffic.items():
        share = 2 * (RANKS - 1) / RANKS if kind == "all-reduce" else 1
        total += share * num_bytes
    return round(total)


def has_to_move(config: RunConfig) -> int:
    """Return the least bytes of a rank, from sizes alone."""
    model, blueprint = build_pieces(config, torch.float32)
    c: Any = model.config
    share = (RANKS - 1) / RANKS
    tokens = ROWS * SEQ_LEN
    if config.mesh.cp > 1:
        q, kv = c.num_heads, c.num_kv_heads
        widths = (
            (c.head_dim,) * 2 if config.model.name == "llama" else (c.qk_head_dim, c.v_head_dim)
        )
        numbers = (q * widths[0] + kv * sum(widths) + q * widths[1]) * tokens / RANKS
        core = 2 * c.num_layers * share * numbers
        whole = sum(p.numel() for p in model.parameters())
        return int((core + 2 * share * whole) * NUMBER)  # FSDP over cp: weights and gradients
    into = 2 * c.hidden_size
    if config.model.name == "pangu_moe":
        into = c.hidden_size + c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim
    layer = 2 * (into + 2 * c.hidden_size)  # forward and backward; two ways out
    stream = share * tokens * (c.num_layers * layer + 2 * 2 * c.hidden_size)
    loss = 2 * share * 3 * tokens  # the largest logit, the sum of exponentials, the label's own
    pipeline, fsdp, _ = build_plans(config)
    plan = resolve_plan(
        model,
        config.mesh.degrees,
        blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        precision=Precision(),
    )
    declared = declare(
        model,
        blueprint,
        degrees=config.mesh.degrees,
        plan=plan,
        fsdp=fsdp,
        tensor=build_tensor(config),
    )
    partial = sum(torch.Size(p.shape).numel() for p in declared if "tp" in p.partial_over)
    return int((stream + loss + 2 * share * partial) * NUMBER)


def main() -> None:
    """Print a row for every case."""
    print(f"{ROWS} x {SEQ_LEN} tokens, {RANKS} ranks, float32\n")
    print("| case | sent | has to move | ratio | calls |")
    print("|---|---|---|---|---|")
    for name, sections in CASES:
        config = config_of(sections)
        traffic = run_on_ranks(count, RANKS, config)[0]
        mine, least = moved(traffic), has_to_move(config)
        calls = ", ".join(f"{calls} {kind}" for kind, (calls, _) in traffic.items())
        print(f"| {name} | {mine} | {least} | {mine / least:.3f} | {calls} |")


if __name__ == "__main__":
    main()
