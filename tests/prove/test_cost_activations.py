"""What ``paralign check`` says activations cost, against what steps on ranks keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paralign.config.model_choice import build_model
from paralign.config.run import RunConfig
from paralign.parallel.recompute import Recompute, apply_recompute
from paralign.parallel.support import Plan
from paralign.prove.cost_activations import Ledger, waiting
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics
from tests.data.texts import write_documents
from tests.memory import bytes_held
from tests.parity import make_config
from tests.prove.test_cost import costs_of

LLAMA = {"name": "llama", "preset": "tiny", "num_layers": 2}
MOE = {"name": "pangu_moe", "preset": "tiny", "num_layers": 2}
ONE_PASS = {"schedule": "GPipe", "num_microbatches": 1}
BATCH = {"global_batch": 8, "seq_len": 64}


def config_of(**sections: Any) -> RunConfig:
    return make_config(**{"model": LLAMA, "batch": BATCH, "pipeline": ONE_PASS, **sections})


def kept(config: RunConfig) -> int:
    """Return the bytes of all storages but parameters' that autograd saves in a step."""
    program = build_program(config, numerics("float32", config))
    batch = program.shard(build_data(config).global_batch(0))
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        origin = tensor if tensor._base is None else tensor._base
        if not isinstance(origin, nn.Parameter):
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        program.step(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


CASES: dict[str, dict[str, Any]] = {
    "llama": {"mesh": {"dp_shard": 2}},
    "ulysses": {"mesh": {"cp": 2}},
    "gathered": {"mesh": {"cp": 2}, "context": {"ulysses_degree": 1}},
    "tp": {"mesh": {"tp": 2}},
    "tp, whole stream": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
    "experts": {"mesh": {"dp_shard": 2}, "model": MOE},
    "documents": {"mesh": {"cp": 2}, "data": {"packing": "isolated"}},
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_what_a_step_keeps_is_what_was_counted(name, tmp_path):
    sections = dict(CASES[name])
    if "data" in sections:
        text = write_documents(tmp_path / "text", *range(2, 60))
        sections["data"] |= {"source": str(text), "token_dir": str(tmp_path)}
    config = config_of(**sections)
    (cost,) = costs_of(config)
    measured = max(run_on_ranks(kept, 2, config, timeout=240))
    assert abs(cost.activation_bytes / measured - 1) < 0.15, (cost.activation_bytes, measured)


def bytes_of(**sections: Any) -> int:
    return max(cost.activation_bytes for cost in costs_of(config_of(**sections)))


def test_recomputation_and_chunks_keep_less():
    whole = bytes_of(model={**LLAMA, "num_layers": 8})
    parts = bytes_of(model={**LLAMA, "num_layers": 8}, recompute={"parts": ["*_norm", "ffn"]})
    block = bytes_of(model={**LLAMA, "num_layers": 8}, recompute={"parts": "block"})
    assert block < parts < whole
    # One input of 8 x 64 x 64 numbers a layer, and one layer as it was.
    layers = whole - bytes_of(model={**LLAMA, "num_layers": 4})
    assert block < whole - layers * 7 // 4 + 8 * 4 * 8 * 64 * 64
    words = {**LLAMA, "vocab_size": 8192}
    assert bytes_of(model=words, loss={"chunks": 8}) < bytes_of(model=words) / 2


@pytest.mark.parametrize(
    "parts",
    [
        ["ffn.experts.permute"],
        ["*.activate"],
        ["ffn.experts.permute", "*.activate"],
        ["ffn.experts"],
    ],
    ids=str,
)
def test_what_experts_compute_again_is_not_counted(parts):
    sections = {"model": {**MOE, "top_k": 8, "expert_hidden_size": 128}, "mesh": {"dp_shard": 1}}
    config = config_of(**sections)
    model, blueprint = build_model(config.model)
    tokens = torch.zeros(BATCH["global_batch"], BATCH["seq_len"], dtype=torch.int64)
    plain = bytes_held(partial(model, tokens))
    for layer in model.get_submodule(blueprint.layers_name).children():
        apply_recompute(layer, Recompute(parts))
    measured = plain - bytes_held(partial(model, tokens))
    counted = bytes_of(**sections) - bytes_of(**sections, recompute={"parts": parts})
    assert abs(counted / measured - 1) < 0.15, (counted, measured)


@pytest.mark.parametrize(
    ("schedule", "m", "per_rank", "expected"),
    [
        ("GPipe", 8, 1, [8, 8, 8, 8]),
        ("1F1B", 8, 1, [4, 3, 2, 1]),
        ("LoopedBFS", 8, 2, [16, 16, 16, 16]),
        # Four of the second stage follow four of the first; one more is begun before each ends.
        ("Interleaved1F1B", 8, 2, [11, 9, 7, 5]),
        ("ZBVZeroBubble", 8, 2, [8, 8, 8, 8]),
    ],
)
def test_micro_batches_that_wait(schedule, m, per_rank, expected):
    plan = Plan(schedule=schedule, num_microbatches=m, pp=4, stages_per_rank=per_rank)
    stages = list(range(per_rank))
    assert [sum(waiting(plan, rank, stages).values()) for rank in range(4)] == expected


def test_a_storage_is_counted_once_and_a_parameter_never():
    weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    ledger = Ledger([weight])
    x = torch.empty(2, 4, device="meta", requires_grad=True)
    with ledger.counting():
        y = x @ weight
        (y * y).sum()
        (y.view(8) * 2.0).exp()
    # x, y once although two products save it, and what exp returns.
    assert ledger.num_bytes == 4 * (8 + 8 + 8)
    ledger.begin()
    ledger.share = 2
    with ledger.counting(), ledger.closed():
        (x * x).sum()
    assert ledger.num_bytes == 0
    ledger.hold(x, x[:1])
    assert ledger.num_bytes == 16
