"""What a plan says of module outputs, and that it is true on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paralign.align.verdict import Report
from paralign.layout import Part
from paralign.models.registry import find_model
from paralign.parallel.tensor_base import Returned, TensorParallel
from paralign.parallel.tensor_outputs import returned_of
from paralign.prove.run import align
from tests.parity import PANGU, make_config

STREAM, WHOLE, FEATURES = Part(dim=1), Part(), Part(dim=-1)


def returned(
    name: str, degree: int, *, sequence_parallel: bool = True, has_experts: bool = False
) -> dict[str, Returned]:
    entry = find_model(name)
    config = entry.configure("tiny" if has_experts or name == "llama" else "tiny_dense")
    with torch.device("meta"):
        model, blueprint = entry.build(config), entry.blueprint(config)
    return returned_of(
        model,
        blueprint.tensor_parallel(),
        degree=degree,
        options=TensorParallel(sequence_parallel=sequence_parallel),
        head_dims={"layers.0.attention.core": 1},
    )


def alike(part: Part) -> Returned:
    return Returned(part, part)


def test_blocks_return_the_stream_and_columns_some_features():
    found = returned("llama", 2)
    for name in ("embedding", "layers.0", "layers.0.attention", "layers.0.ffn.down", "norm"):
        assert found[name] == alike(STREAM), name
    assert found["layers.0.attention.wq"] == found["layers.0.ffn.up"] == alike(FEATURES)
    assert found["layers.0.attention.core"] == alike(Part(dim=1))
    assert "head" not in found  # its output is a DTensor


def test_experts_return_the_stream_and_the_shared_one_a_part_of_it_in_any_case():
    for sequence_parallel, stream in ((True, STREAM), (False, WHOLE)):
        found = returned("pangu_moe", 2, sequence_parallel=sequence_parallel, has_experts=True)
        assert found["layers.1.ffn"] == alike(stream)
        assert found["layers.1.ffn.shared"] == alike(STREAM)
        assert "layers.1.ffn.experts" not in found


def test_without_sequence_parallel_the_stream_is_whole():
    assert returned("llama", 2, sequence_parallel=False)["layers.0"] == alike(WHOLE)


def test_gradients_of_what_ranks_share_are_summands():
    heads = 2  # key heads of the preset, shared by four ranks
    value = Part(dim=-1, num_parts=heads)
    grad = Part(dim=-1, num_parts=heads, is_sum=True)
    assert returned("llama", 4)["layers.0.attention.wk"] == Returned(value, grad)
    key = returned("pangu_moe", 2)["layers.0.attention.rotary_key"]
    assert key == Returned(WHOLE, Part(is_sum=True))


def judged(name: str, **changes: Any) -> Report:
    sections: dict[str, Any] = {
        "mesh": {"tp": 4},
        "pipeline": {"num_microbatches": 2},
        "batch": {"global_batch": 4, "seq_len": 16},
        "align": {"record": "activations"},
    }
    if name == "pangu_moe":
        sections["model"] = PANGU
    report: Report = align(make_config(**{**sections, **changes}))
    return report


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {"mesh": {"tp": 4}}, marks=pytest.mark.long),
        pytest.param(
            "llama",
            {"mesh": {"tp": 2, "cp": 2}, "tensor": {"sequence_parallel": False}},
            marks=pytest.mark.long,
        ),
        ("pangu_moe", {"mesh": {"pp": 2, "tp": 2}}),
    ],
    ids=["shared heads", "whole stream", "latents"],
)
def test_every_output_is_compared_on_ranks(name, changes):
    report = judged(name, **changes)
    assert report.verdict == "aligned", report.why
    # An output that is placed wrongly would be off, and then listed without budget.
    outputs = [row for row in report.tensors if row.kind in ("output", "output_grad")]
    assert len({row.name for row in outputs}) > 20
    assert all(row.budget_eps is not None and row.eps < 40 for row in outputs)
