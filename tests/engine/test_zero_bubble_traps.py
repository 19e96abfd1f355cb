"""Traps of the zero-bubble schedules, which split the backward pass in two; see docs/engine.md.

Most need no second pipeline rank. Some show only on a stage that is neither the first nor the last
one, so these use four stages.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paralign.testing import run_on_ranks
from tests.engine.toys import (
    Block,
    Model,
    build,
    error_of,
    pipe,
    reference,
    whole_gradients,
    wrap_blocks,
    wrap_children,
)
from tests.engine.traps import EXACT, still_there

pytestmark = pytest.mark.ranks
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


def wrap_gathered(stage: Model, mesh: DeviceMesh) -> None:
    wrap_blocks(stage, mesh, reshard_after_forward=False)


def wrap_root(stage: Model, mesh: DeviceMesh) -> None:
    fully_shard(stage, mesh=mesh)


def worst_error_of_resharding(name: str) -> dict[str, float]:
    expected = reference(build())
    seen: dict[str, float] = {}
    wraps = {"default": wrap_blocks, "kept gathered": wrap_gathered, "root alone": wrap_root}
    for kind, wrap in wraps.items():
        p = pipe(build(), name, wrap)
        p.step()
        seen[kind] = max(p.errors(expected).values())  # infinite: a gradient is None
    return seen  # {"default": inf, "kept gathered": 3e-16, "root alone": 3e-16}


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_blocks_that_reshard_get_wrong_gradients(name):
    seen = run_on_ranks(worst_error_of_resharding, 2, name)[0]
    still_there(
        "zero-bubble-with-blocks-that-reshard-gives-wrong-gradients",
        broken=not seen["default"] <= EXACT,
        cured=seen["kept gathered"] <= EXACT and seen["root alone"] <= EXACT,
        seen=seen,
    )


def wrap_children_and_root(stage: Model, mesh: DeviceMesh) -> None:
    wrap_children(stage, mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def outcome_without_a_root(name: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    for kind, wrap in (("children", wrap_children), ("+ root", wrap_children_and_root)):
        p = pipe(build(), name, wrap)
        seen[kind] = error_of(p.step) or str(max(p.errors(reference(build())).values()))
    return seen  # {"children": "KeyError: <AccumulateGrad ...>", "+ root": "3e-16"}


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_children_without_a_root_lose_gradients(name):
    seen = run_on_ranks(outcome_without_a_root, 2, name)[0]
    still_there(
        "zero-bubble-without-a-wrapped-root-loses-gradients",
        broken="KeyError" in seen["children"] or seen["children"] == "inf",
        cured=float(seen["+ root"]) <= EXACT,
        seen=seen,
    )


def missing_gradients_after_a_frozen_stage(static: bool) -> list[str]:
    model = build()
    for part in (model.embedding, model.layers["0"]):  # all of the first of four stages
        assert part is not None
        part.requires_grad_(False)
    p = pipe(model, "InterleavedZeroBubble", num_stages=4, static=static)
    p.step()
    return [name for name, error in p.errors(reference(model)).items() if not error <= EXACT]


def test_a_frozen_first_stage_leaves_gradients_none():
    (guessed,) = run_on_ranks(missing_gradients_after_a_frozen_stage, 1, False)
    (given,) = run_on_ranks(missing_gradients_after_a_frozen_stage, 1, True)
    still_there(
        "zero-bubble-after-a-frozen-stage-leaves-gradients-none",
        broken=bool(guessed),
        cured=not given,
        seen=guessed,
    )


def error_of_bf16_accumulation(name: str) -> float:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build().float()
    grads: list[dict[str, Tensor]] = []

    def wrap(stage: Model, mesh: DeviceMesh) -> None:
        wrap_blocks(stage, mesh, reshard_after_forward=False, mp_policy=policy)

    for schedule in (name, "Interleaved1F1B"):  # the same micro-batches, each with equal bits
        p = pipe(model, schedule, wrap, pp=2, static=False)
        p.step()
        grads.append(whole_gradients(p.stages))
    ours, exact = grads
    return max(float((ours[n] - exact[n]).norm() / exact[n].norm()) for n in exact)


def test_bf16_gradients_are_accumulated_in_bf16():
    off = max(run_on_ranks(error_of_bf16_accumulation, 2, "InterleavedZeroBubble"))
    ordinary = max(run_on_ranks(error_of_bf16_accumulation, 2, "LoopedBFS"))
    still_there(
        "zero-bubble-accumulates-bf16-gradients-in-bf16",
        broken=off > 1e-4,
        cured=ordinary <= 1e-6,
        seen=(off, ordinary),
    )


class Recomputed(Block):
    """A block that recomputes its activations in the backward pass and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            self.forwards += 1
            return Block.forward(self, x)

        y: Tensor = checkpoint(body, x, use_reentrant=False)
        return y


def forwards_of_recomputed_blocks(name: str) -> list[int]:
    model = build()
    for i in model.layers:
        model.layers[i] = Recomputed().double()
    p = pipe(model, name, num_microbatches=4, num_stages=4)
    p.step()
    layers = [layer for stage in p.stages for layer in stage.layers.values()]
    return [layer.forwards for layer in layers if isinstance(layer, Recomputed)]


def test_recomputation_runs_more_than_once():
    (seen,) = run_on_ranks(forwards_of_recomputed_blocks, 1, "InterleavedZeroBubble")
    (ordinary,) = run_on_ranks(forwards_of_recomputed_blocks, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-recomputes-activations-more-than-once",
        broken=max(seen) > 8,
        cured=ordinary == [8] * 4,  # one forward and one recomputation of 4 micro-batches
        seen=(seen, ordinary),
    )


class Viewing(nn.Module):
    """A last module of a stage that returns a view, contiguous all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).view(x.shape)


def step_with_a_view_at_a_stage_border(name: str) -> str:
    model = build()
    model.layers["1"] = nn.Sequential(model.layers["1"], Viewing())  # the second stage ends here
    return error_of(pipe(model, name, num_stages=4).step)


def test_a_view_as_stage_output_crashes():
    (error,) = run_on_ranks(step_with_a_view_at_a_stage_border, 1, "InterleavedZeroBubble")
    (ordinary,) = run_on_ranks(step_with_a_view_at_a_stage_border, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-crashes-on-a-stage-output-that-is-a-view",
        broken="view" in error,
        cured=ordinary == "",
        seen=error,
    )


def step_with_a_backward_hook(on: str) -> str:
    p = pipe(build(), "InterleavedZeroBubble", num_microbatches=4, num_stages=4)
    last = p.stages[1].layers["1"]  # the last module of the second stage
    fired: list[Tensor] = []
    if on == "module":
        last.register_full_backward_hook(lambda *_: fired.append(torch.ones(())))
    else:
        last.register_forward_hook(lambda _m, _args, y: y.register_hook(fired.append) and None)
    return error_of(p.step) or f"fired {len(fired)} times"


def test_a_backward_hook_on_the_last_module_crashes():
    (module,) = run_on_ranks(step_with_a_backward_hook, 1, "module")
    (tensor,) = run_on_ranks(step_with_a_backward_hook, 1, "tensor")
    still_there(
        "zero-bubble-crashes-on-a-full-backward-hook",
        broken="view" in module,
        cured=tensor == "fired 4 times",
        seen=(module, tensor),
    )


def accumulation_hooks_fired(name: str) -> set[int]:
    p = pipe(build(), name, num_microbatches=4, num_stages=4)
    fired: Counter[Tensor] = Counter()
    parameters = [q for stage in p.stages for q in stage.parameters()]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda q: fired.update([q]))
    p.step()
    return {fired[parameter] for parameter in parameters}


def test_accumulation_hooks_do_not_fire():
    (seen,) = run_on_ranks(accumulation_hooks_fired, 1, "InterleavedZeroBubble")
    (ordinary,) = run_on_ranks(accumulation_hooks_fired, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-skips-accumulation-hooks",
        broken=seen == {0, 4},
        cured=ordinary == {4},
        seen=seen,
    )


def error_of_data_parallel(name: str) -> float:
    p = pipe(build(), name, num_microbatches=4)
    group = p.mesh["dp"].get_group()
    for torch_stage in p.schedule._stages:
        torch_stage.submod = DistributedDataParallel(torch_stage.submod, process_group=group)
    p.step()
    average = {key: grad / 2 for key, grad in reference(build()).items()}  # over two ranks
    return max(p.errors(average).values())


def test_data_parallel_gradients_are_never_reduced():
    off = run_on_ranks(error_of_data_parallel, 2, "InterleavedZeroBubble")[0]
    exact = run_on_ranks(error_of_data_parallel, 2, "Interleaved1F1B")[0]
    still_there(
        "zero-bubble-with-distributeddataparallel-is-never-reduced",
        broken=not off <= EXACT,
        cured=exact <= EXACT,
        seen=(off, exact),
    )
