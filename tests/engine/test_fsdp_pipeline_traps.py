"""Traps of FSDP units under a pipeline schedule; each is a section of docs/engine.md."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paralign.testing import run_on_ranks
from tests.engine.toys import (
    Model,
    build,
    count_collectives,
    ends,
    error_of,
    pipe,
    reference,
    sum_gradients,
    wrap_blocks,
    wrap_children,
)
from tests.engine.traps import EXACT, still_there

pytestmark = pytest.mark.ranks


def wrap_children_and_root(stage: Model, mesh: DeviceMesh) -> None:
    wrap_children(stage, mesh)
    fully_shard(stage, mesh=mesh)  # owns nothing, but switches the reduction on and off


def reductions_per_step() -> dict[str, tuple[int, float]]:
    seen: dict[str, tuple[int, float]] = {}
    for kind, wrap in (("children", wrap_children), ("+ root", wrap_children_and_root)):
        p = pipe(build(), "1F1B", wrap, num_microbatches=4)
        counts = count_collectives(p.step)
        error = max(p.errors(reference(build())).values())
        seen[kind] = counts["c10d::_reduce_scatter_base_"], error
    return seen  # {"children": (28, 3e-16), "+ root": (7, 3e-16)}


def test_without_a_wrapped_root_every_micro_batch_is_reduced():
    seen = run_on_ranks(reductions_per_step, 2)[0]
    (without, error), (with_root, exact) = seen["children"], seen["+ root"]
    still_there(
        "without-a-wrapped-root-every-micro-batch-is-reduced",
        broken=without == 4 * with_root and error <= EXACT,
        cured=with_root == 7 and exact <= EXACT,
        seen=seen,
    )


def wrap_list(stage: Model, mesh: DeviceMesh) -> None:
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(ends(stage), mesh=mesh)  # one unit: [embedding, norm, head]


def wrap_list_and_root(stage: Model, mesh: DeviceMesh) -> None:
    wrap_list(stage, mesh)
    fully_shard(stage, mesh=mesh)


def list_unit_without_a_root() -> dict[str, str]:
    seen: dict[str, str] = {}
    for kind, wrap in (("list", wrap_list), ("+ root", wrap_list_and_root)):
        p = pipe(build(), "1F1B", wrap)
        seen[kind] = error_of(p.step) or str(max(p.errors(reference(build())).values()))
    return seen  # {"list": "RuntimeError: ...", "+ root": "3e-16"}


def test_a_list_unit_without_a_wrapped_root_raises():
    seen = run_on_ranks(list_unit_without_a_root, 2)[0]
    still_there(
        "a-unit-that-is-a-list-needs-a-wrapped-root",
        broken="Error: " in seen["list"],
        cured=float(seen["+ root"]) <= EXACT,
        seen=seen,
    )


def wrap_gathered(stage: Model, mesh: DeviceMesh) -> None:
    wrap_blocks(stage, mesh, reshard_after_forward=False)


def gathers_per_step() -> dict[str, int]:
    seen: dict[str, int] = {}
    for kind, wrap in (("default", wrap_blocks), ("kept gathered", wrap_gathered)):
        p = pipe(build(), "1F1B", wrap, num_microbatches=4)
        seen[kind] = count_collectives(p.step)["c10d::_allgather_base_"]
    return seen  # {"default": 21, "kept gathered": 5}


def test_resharding_gathers_once_per_micro_batch_and_pass():
    seen = run_on_ranks(gathers_per_step, 2)[0]
    still_there(
        "resharding-gathers-in-every-micro-batch",
        broken=seen["default"] == 21,
        cured=seen["kept gathered"] == 5,
        seen=seen,
    )


def one_parameter_in_two_roots() -> dict[str, float]:
    model = build(tied=True)
    expected = reference(model)["embedding.weight"]
    seen: dict[str, float] = {}
    for kind in ("shared", "two parameters"):
        p = pipe(model, "ZBVZeroBubble")  # both stages are on this rank
        first, last = p.stages
        assert first.embedding is not None
        assert last.head is not None
        if kind == "shared":
            last.head.weight = first.embedding.weight
        for stage in p.stages:
            wrap_gathered(stage, p.mesh["dp"])
            sum_gradients(stage)
        p.step()
        grads = [part.weight.grad for part in (first.embedding, last.head)]
        whole = [grad.full_tensor() for grad in grads if isinstance(grad, DTensor)]
        total = whole[0] if kind == "shared" else sum(whole, torch.zeros_like(expected))
        seen[kind] = float((total - expected).norm() / expected.norm())
    return seen


def test_one_parameter_in_two_fsdp_roots_is_wrong():
    seen = run_on_ranks(one_parameter_in_two_roots, 2)[0]
    still_there(
        "a-tied-parameter-in-two-fsdp-roots-is-wrong",
        broken=not seen["shared"] <= EXACT,
        cured=seen["two parameters"] <= EXACT,
        seen=seen,
    )
