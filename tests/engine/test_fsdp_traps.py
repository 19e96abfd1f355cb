"""Traps of ``fully_shard`` without a pipeline; each is a section of docs/engine.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paralign.testing import run_on_ranks
from tests.engine.toys import (
    Model,
    batch,
    build,
    ends,
    error_of,
    gradient_errors,
    loss_of,
    reference,
    sum_gradients,
    wrap_blocks,
    wrap_children,
)
from tests.engine.traps import EXACT, failure_of, still_there

pytestmark = pytest.mark.ranks


def backward(model: Model, mesh: DeviceMesh) -> None:
    """Run forward and backward on this rank's rows of the global batch."""
    rank = mesh.get_local_rank()
    tokens, labels = (tensor.chunk(mesh.size())[rank] for tensor in batch())
    loss_of(model(tokens), labels).backward()


def divide_factor_alone() -> dict[str, str]:
    seen: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (2,))
    for kind, force_sum in (("factor", False), ("factor and forced sum", True)):
        model = build().float()  # fp32 and bf16; fp64 and fp16 divide by themselves
        fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(force_sum)
        run = partial(backward, model, mesh)
        seen[kind] = error_of(run) or str(
            max(gradient_errors([model], reference(build())).values())
        )
    return seen  # {"factor": "RuntimeError: ... PREMUL_SUM ...", "factor and forced sum": "3e-7"}


def test_a_divide_factor_alone_fails_on_gloo():
    seen = run_on_ranks(divide_factor_alone, 2)[0]
    still_there(
        "a-gradient-divide-factor-alone-fails-on-gloo",
        broken="PREMUL_SUM" in seen["factor"],
        cured=float(seen["factor and forced sum"]) <= 1e-5,
        seen=seen,
    )


def divide_factor_on_the_root_only() -> dict[str, dict[str, float]]:
    seen: dict[str, dict[str, float]] = {}
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("root", "every unit"):
        model = build()
        wrap_blocks(model, mesh)
        if kind == "every unit":
            sum_gradients(model)
        elif isinstance(model, FSDPModule):
            model.set_force_sum_reduction_for_comms(True)
            model.set_gradient_divide_factor(1.0)
        backward(model, mesh)
        errors = gradient_errors([model], reference(build()))
        seen[kind] = {name: errors[name] for name in ("embedding.weight", "layers.0.up.weight")}
    return seen  # {"root": {... 2e-16, ... 0.5}, "every unit": {... 2e-16, ... 3e-16}}


def test_a_divide_factor_is_not_recursive():
    seen = run_on_ranks(divide_factor_on_the_root_only, 2)[0]
    embedding, block = seen["root"].values()
    still_there(
        "a-gradient-divide-factor-does-not-reach-inner-units",
        broken=embedding <= EXACT and not block <= EXACT,
        cured=max(seen["every unit"].values()) <= EXACT,
        seen=seen,
    )


class Optional(nn.Module):
    """Uses its second layer only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if use else y


def parameter_used_on_one_rank(reduce_unused: bool) -> float:
    torch.manual_seed(0)
    model = Optional().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    grad = torch.autograd.grad(model(x[:2], True).pow(2).sum(), model.sometimes.weight)[0]
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    sum_gradients(model)
    if isinstance(model, FSDPModule):
        model.set_reduce_scatter_unused_params(reduce_unused)
    rank = mesh.get_local_rank()
    model(x.chunk(2)[rank], use=rank == 0).pow(2).sum().backward()
    ours = model.sometimes.weight.grad
    assert isinstance(ours, DTensor)
    return float((ours.full_tensor() - grad).norm() / grad.norm())


def test_a_parameter_used_on_some_ranks_ends_the_run():
    failure = failure_of(parameter_used_on_one_rank, 2, False)
    cured = run_on_ranks(parameter_used_on_one_rank, 2, True)[0]
    still_there(
        "a-parameter-used-on-some-ranks-only-ends-the-run",
        broken=failure != "",
        cured=cured <= EXACT,
        seen=(failure, cured),
    )


def gradient_of_an_unused_parameter(reduce_unused: bool) -> bool:
    model = Optional()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if isinstance(model, FSDPModule):
        model.set_reduce_scatter_unused_params(reduce_unused)
    model(torch.ones(2, 4), use=False).sum().backward()
    return model.sometimes.weight.grad is None


def test_reducing_unused_parameters_turns_none_into_zero():
    still_there(
        "reducing-unused-parameters-turns-none-into-zero",
        broken=run_on_ranks(gradient_of_an_unused_parameter, 2, True) == [False, False],
        cured=run_on_ranks(gradient_of_an_unused_parameter, 2, False) == [True, True],
        seen="gradient of a parameter that no rank uses",
    )


def wrap_blocks_only(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)


def errors_outside_every_unit() -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}
    mesh = init_device_mesh("cpu", (2,))
    for kind, wrap in (("blocks", wrap_blocks_only), ("blocks and root", wrap_blocks)):
        model = build()
        wrap(model, mesh)
        sum_gradients(model)
        backward(model, mesh)
        errors = gradient_errors([model], reference(build()))
        seen[kind] = [name for name, error in errors.items() if not error <= EXACT]
    return seen  # {"blocks": ["embedding.weight", "norm.weight", ...], "blocks and root": []}


def test_parameters_outside_every_unit_are_not_reduced():
    seen = run_on_ranks(errors_outside_every_unit, 2)[0]
    still_there(
        "parameters-outside-every-unit-are-never-reduced",
        broken=seen["blocks"] == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"],
        cured=seen["blocks and root"] == [],
        seen=seen,
    )


def wrap_ends_together(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(ends(model), mesh=mesh)  # embedding, norm and head are one unit
    wrap_blocks(model, mesh)


def tied_errors(wrap: Callable[[Model, DeviceMesh], None]) -> dict[str, float]:
    model = build(tied=True)
    expected = reference(model)
    mesh = init_device_mesh("cpu", (2,))
    wrap(model, mesh)
    sum_gradients(model)
    backward(model, mesh)
    errors = gradient_errors([model], expected)
    return {name: errors[name] for name in ("embedding.weight", "head.weight")}


def test_a_tied_pair_wrapped_apart_is_untied():
    apart = run_on_ranks(tied_errors, 2, wrap_children)[0]
    together = run_on_ranks(tied_errors, 2, wrap_ends_together)[0]
    still_there(
        "a-tied-pair-wrapped-in-two-units-is-untied",
        broken=not max(apart.values()) <= EXACT,
        cured=max(together.values()) <= EXACT,
        seen=(apart, together),
    )


def refused_containers() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    seen: list[str] = []
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        seen.append(error_of(partial(fully_shard, container, mesh=mesh)))
    return seen  # ["ValueError: ...", "ValueError: ..."]


def test_containers_are_refused():
    seen = run_on_ranks(refused_containers, 2)[0]
    still_there(
        "containers-without-a-forward-are-refused",
        broken=all("ValueError" in error for error in seen),
        cured=True,
        seen=seen,
    )
