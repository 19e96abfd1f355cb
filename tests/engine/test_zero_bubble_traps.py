"""Traps of the zero-bubble schedules, which split the backward pass; see docs/engine.md.

DualPipeV splits it only where pp > 1, so these reproductions, on one pipeline rank, use the others.
"""

from __future__ import annotations

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


def missing_gradients_after_a_frozen_stage(name: str) -> list[str]:
    model = build()
    for part in (model.embedding, model.layers["0"], model.layers["1"]):
        assert part is not None
        part.requires_grad_(False)  # all of the first of two stages
    p = pipe(model, name, num_microbatches=4)
    p.step()
    return [name for name, error in p.errors(reference(model)).items() if not error <= EXACT]


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_a_frozen_first_stage_leaves_gradients_none(name):
    (missing,) = run_on_ranks(missing_gradients_after_a_frozen_stage, 1, name)
    (ordinary,) = run_on_ranks(missing_gradients_after_a_frozen_stage, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-after-a-frozen-stage-leaves-gradients-none",
        broken=bool(missing),
        cured=not ordinary,
        seen=missing,
    )


def error_of_bf16_accumulation(name: str) -> float:
    grads: list[dict[str, Tensor]] = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(stage: Model, mesh: DeviceMesh) -> None:
        wrap_blocks(stage, mesh, reshard_after_forward=False, mp_policy=policy)

    for schedule in (name, "Interleaved1F1B"):  # the same sums of the same bf16 micro-batches
        p = pipe(build().float(), schedule, wrap, num_microbatches=8, static=False)
        p.step()
        named = [pair for stage in p.stages for pair in stage.named_parameters()]
        grads.append({n: q.grad.full_tensor().double() for n, q in named})  # type: ignore[union-attr]
    ours, exact = grads
    return max(float((ours[n] - exact[n]).norm() / exact[n].norm()) for n in exact)


def test_bf16_gradients_are_accumulated_in_bf16():
    (off,) = run_on_ranks(error_of_bf16_accumulation, 1, "InterleavedZeroBubble")
    (exact,) = run_on_ranks(error_of_bf16_accumulation, 1, "LoopedBFS")
    still_there(
        "zero-bubble-accumulates-bf16-gradients-in-bf16",
        broken=off > 1e-4,
        cured=exact <= 1e-6,
        seen=(off, exact),
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


def forwards_with_recomputation(name: str) -> int:
    model = build()
    for i in model.layers:
        model.layers[i] = Recomputed().double()
    p = pipe(model, name, num_microbatches=4)
    p.step()
    layers = [layer for stage in p.stages for layer in stage.layers.values()]
    return sum(layer.forwards for layer in layers if isinstance(layer, Recomputed))


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_recomputation_runs_many_times(name):
    (forwards,) = run_on_ranks(forwards_with_recomputation, 1, name)
    (ordinary,) = run_on_ranks(forwards_with_recomputation, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-recomputes-each-block-several-times",
        broken=forwards >= 2 * ordinary,
        cured=ordinary == 2 * 4 * 4,  # forward and recomputation, 4 blocks, 4 micro-batches
        seen=(forwards, ordinary),
    )


class Viewing(nn.Module):
    """A last module of a stage that returns a view, contiguous all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).view(x.shape)


def step_with_a_view_at_the_stage_border(name: str) -> str:
    model = build()
    model.layers["1"] = nn.Sequential(model.layers["1"], Viewing())  # the first stage ends here
    return error_of(pipe(model, name, num_microbatches=4).step)


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_a_view_as_stage_output_crashes(name):
    (error,) = run_on_ranks(step_with_a_view_at_the_stage_border, 1, name)
    (ordinary,) = run_on_ranks(step_with_a_view_at_the_stage_border, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-crashes-on-a-stage-output-that-is-a-view",
        broken="Error" in error,
        cured=ordinary == "",
        seen=error,
    )


def step_with_a_backward_hook(how: str) -> str:
    p = pipe(build(), "InterleavedZeroBubble", num_microbatches=4)
    last = p.stages[0].layers["1"]  # the last module of the first stage
    fired: list[str] = []
    if how == "module":
        last.register_full_backward_hook(lambda *_: fired.append(how))
    else:
        last.register_forward_hook(
            lambda _module, _args, y: y.register_hook(lambda _grad: fired.append(how)) and None
        )
    return error_of(p.step) or f"fired {len(fired)} times"


def test_a_backward_hook_on_the_last_module_crashes():
    (module,) = run_on_ranks(step_with_a_backward_hook, 1, "module")
    (tensor,) = run_on_ranks(step_with_a_backward_hook, 1, "tensor")
    still_there(
        "zero-bubble-crashes-on-a-full-backward-hook",
        broken="Error" in module,
        cured=tensor == "fired 4 times",
        seen=(module, tensor),
    )


def hooks_of_an_accumulated_gradient(name: str) -> set[int]:
    p = pipe(build(), name, num_microbatches=4)
    fired: dict[str, int] = {}
    for stage in p.stages:
        for key, parameter in stage.named_parameters():
            fired[key] = 0

            def count(_: Tensor, key: str = key) -> None:
                fired[key] += 1

            parameter.register_post_accumulate_grad_hook(count)
    p.step()
    return set(fired.values())


def test_accumulation_hooks_do_not_fire_for_every_parameter():
    (seen,) = run_on_ranks(hooks_of_an_accumulated_gradient, 1, "InterleavedZeroBubble")
    (ordinary,) = run_on_ranks(hooks_of_an_accumulated_gradient, 1, "Interleaved1F1B")
    still_there(
        "zero-bubble-skips-accumulation-hooks",
        broken=seen != {4},
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
