"""Traps of hooks, recomputation, clipping and optimizer state; see docs/engine.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from paralign.testing import run_on_ranks
from tests.engine.toys import build, count_collectives, error_of, pipe, wrap_blocks
from tests.engine.traps import still_there

pytestmark = pytest.mark.ranks


def hooks_of_a_sharded_parameter() -> dict[str, int]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    seen = {"register_hook": 0, "post_accumulate": 0}

    def count(kind: str) -> None:
        seen[kind] += 1

    model.weight.register_hook(lambda _: count("register_hook"))
    model.weight.register_post_accumulate_grad_hook(lambda _: count("post_accumulate"))
    model(torch.ones(2, 4)).sum().backward()
    return seen  # {"register_hook": 0, "post_accumulate": 1}


def test_a_parameter_hook_never_fires_under_fsdp():
    seen = run_on_ranks(hooks_of_a_sharded_parameter, 2)[0]
    still_there(
        "fsdp-never-fires-a-parameters-own-hook",
        broken=seen["register_hook"] == 0,
        cured=seen["post_accumulate"] == 1,
        seen=seen,
    )


class Two(nn.Module):
    """Two layers, recomputed together in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        def body(x: Tensor) -> Tensor:
            y: Tensor = self.second(torch.tanh(self.first(x)))
            return y

        y: Tensor = checkpoint(body, x, use_reentrant=reentrant)
        return y


def hooks_around_recomputation(reentrant: bool) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {"forward": [], "recomputation": []}
    model = Two()

    def note(what: str) -> None:
        # The id of the backward pass that runs now: -1 outside of one.
        recomputing = torch._C._current_graph_task_id() != -1
        seen["recomputation" if recomputing else "forward"].append(what)

    for name, layer in model.named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: note(f"before {name}"))
        layer.register_forward_hook(lambda *_, name=name: note(f"after {name}"))
    model(torch.ones(2, 4, requires_grad=True), reentrant).sum().backward()
    return seen


def test_forward_hooks_are_missing_from_a_recomputation():
    (seen,) = run_on_ranks(hooks_around_recomputation, 1, False)
    (reentrant,) = run_on_ranks(hooks_around_recomputation, 1, True)
    still_there(
        "a-recomputation-stops-before-the-last-forward-hooks",
        broken="after second" not in seen["recomputation"],
        cured=seen["forward"] == reentrant["forward"] == reentrant["recomputation"],
        seen=(seen, reentrant),
    )


def names_of_wrapped_parameters() -> list[list[str]]:
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    return [[name for name, _ in wrapped.named_parameters()], list(wrapped.state_dict())]


def test_a_checkpoint_wrapper_renames_parameters():
    parameters, state = names_of_wrapped_parameters()
    still_there(
        "a-checkpoint-wrapper-renames-parameters",
        broken=parameters[0] == "0._checkpoint_wrapped_module.weight",
        cured=state == ["0.weight", "0.bias"],
        seen=(parameters, state),
    )


def communication_of_a_step() -> dict[str, str]:
    debugged, profiled = (pipe(build(), "1F1B", wrap_blocks) for _ in range(2))
    with CommDebugMode():
        error = error_of(debugged.step)
    counts = count_collectives(profiled.step)  # by torch.profiler
    return {"CommDebugMode": error, "profiler": str(counts["c10d::_reduce_scatter_base_"])}


def test_comm_debug_mode_raises_in_a_stage():
    seen = run_on_ranks(communication_of_a_step, 2)[0]
    still_there(
        "commdebugmode-raises-inside-a-pipeline-stage",
        broken="IndexError" in seen["CommDebugMode"],
        cured=seen["profiler"] == "5",
        seen=seen,
    )


def optimizer_state_of_one_stage() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))  # two stages on this rank
    for stage in stages:
        fully_shard(stage, mesh=mesh)
    optimizer = torch.optim.AdamW(stages.parameters())
    for parameter in stages.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "one stage": error_of(lambda: get_optimizer_state_dict(stages[0], optimizer)),
        "all stages": error_of(lambda: get_optimizer_state_dict(stages, optimizer)),
    }


def test_optimizer_state_of_one_of_several_stages():
    seen = run_on_ranks(optimizer_state_of_one_stage, 2)[0]
    still_there(
        "the-optimizer-state-of-one-of-several-stages-cannot-be-read",
        broken="KeyError" in seen["one stage"],
        cured=seen["all stages"] == "",
        seen=seen,
    )


def clipping_over_two_meshes() -> dict[str, str]:
    dense_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    expert_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    dense = nn.Parameter(distribute_tensor(torch.ones(4), dense_mesh, [Shard(0)]))
    expert = nn.Parameter(distribute_tensor(torch.ones(4), expert_mesh["ep"], [Shard(0)]))
    for parameter in (dense, expert):
        parameter.grad = torch.ones_like(parameter)
    both = [dense, expert]
    return {
        "clip": error_of(lambda: torch.nn.utils.clip_grad_norm_(both, 1.0)),
        "one by one": error_of(lambda: [torch.nn.utils.clip_grad_norm_([p], 1.0) for p in both]),
        "AdamW": error_of(lambda: torch.optim.AdamW(both, foreach=True).step()),
    }


def test_clipping_over_two_meshes_raises():
    seen = run_on_ranks(clipping_over_two_meshes, 2)[0]
    still_there(
        "clipping-parameters-of-two-meshes-raises",
        broken="Error" in seen["clip"],
        cured=seen["one by one"] == seen["AdamW"] == "",
        seen=seen,
    )
