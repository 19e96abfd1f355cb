from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paralign.errors import LayoutError
from paralign.mesh import Degrees, build_mesh
from paralign.parallel.data import (
    FSDP,
    ROOT_UNIT,
    Precision,
    ReductionCounter,
    apply_fsdp,
    check_units,
    fsdp_mesh,
    plan_units,
)
from paralign.testing import run_on_ranks

LAYERS = ["layers.2", "layers.3"]
MODULES = ["layers", *LAYERS, "layers.2.attention", "layers.3.attention", "norm", "head"]


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("root", []),
        ("blocks", [["layers.2"], ["layers.3"]]),
        ("first_block", [["layers.2"]]),
        ([["layers.2", "layers.3"], ["head"]], [["layers.2", "layers.3"], ["head"]]),
        # What is on other stages is left to them.
        ([["embedding", "layers.0"], ["layers.1", "layers.2"]], [["layers.2"]]),
        ([["layers.2.attention"], ["norm", "head"]], [["layers.2.attention"], ["norm", "head"]]),
    ],
)
def test_units_of_a_stage(wrap, expected):
    assert plan_units(wrap, LAYERS, MODULES) == expected


def test_defaults_are_one_unit_a_block_and_nothing_cast():
    assert FSDP() == FSDP(wrap="blocks", reshard_after_forward=None)
    assert Precision() == Precision(compute=None, reduce=None)


def test_listed_units_that_fit():
    check_units([["layers.2.attention"], ["layers.3", "norm"]], MODULES)
    for wrap in ("root", "blocks", "first_block"):
        check_units(wrap, [])


def test_every_listed_unit_that_does_not_fit_is_said_at_once():
    wrap = [["layers.2", "attention"], ["layers.2.attention", "norm"], ["norm", "lm_head", "xyz"]]
    with pytest.raises(LayoutError) as caught:
        check_units(wrap, MODULES)
    assert str(caught.value) == (
        "fsdp wrap lists units that cannot be made:\n"
        "  - 'attention' matches no module of the model. Did you mean 'layers.2.attention'?\n"
        "  - 'layers.2.attention' and 'layers.2' overlap: a parameter belongs to one unit.\n"
        "  - 'norm' and 'norm' overlap: a parameter belongs to one unit.\n"
        "  - 'lm_head' matches no module of the model. Did you mean 'head'?\n"
        "  - 'xyz' matches no module of the model."
    )


def test_names_that_only_start_alike_do_not_overlap():
    check_units([["layers.1"], ["layers.10"]], ["layers.1", "layers.10"])


class Toy(nn.Module):
    """Three parameters, of which one has fewer rows than there are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
        self.scale = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        out: Tensor = x * self.scale[0] + self.scale[1]
        return out


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


def rows_of(rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)).double()


def gradients_on_a_mesh(degrees: Degrees, reshard: bool | None) -> dict[str, Any]:
    mesh = build_mesh(degrees)
    expected = toy()
    for rank in range(mesh.size()):
        expected(rows_of(rank)).square().sum().backward()
    seen: dict[str, Any] = {}
    for number, units in enumerate(([], [["inner.0"], ["inner.1"]], [["inner.0", "inner.1"]])):
        counter = ReductionCounter()
        model = apply_fsdp(
            toy(),
            mesh,
            units=units,
            reshard_after_forward=reshard,
            precision=Precision(),
            counter=counter,
            label="stage 7: ",
        )
        errors = []
        for _ in range(2):
            counter.reset()
            model.zero_grad()
            model(rows_of(mesh.get_rank())).square().sum().backward()
            parameters: list[tuple[str, Any]] = list(model.named_parameters())
            for name, parameter in parameters:
                whole: Any = expected.get_parameter(name).grad
                errors.append(float((parameter.grad.full_tensor() - whole).norm() / whole.norm()))
        seen[f"error {number}"] = max(errors)
        seen[f"counts {number}"] = dict(counter.counts)
        seen[f"parameters {number}"] = counter.parameters
        held = parameter.device_mesh
        seen["mesh"] = (held.mesh_dim_names, tuple(held.shape))
        # What is inside a unit that is no unit itself is left as it was.
        seen[f"units {number}"] = sorted(
            name for name, module in model.named_modules() if isinstance(module, FSDPModule)
        )
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("degrees", "mesh", "reshard"),
    [
        (Degrees(dp_shard=2, cp=2), (("fsdp",), (4,)), True),
        (Degrees(dp_replicate=2, cp=2), (("dp_replicate", "fsdp"), (2, 2)), None),
        (Degrees(dp_replicate=2), (("dp_replicate", "fsdp"), (2, 1)), False),
        (Degrees(), (("fsdp",), (1,)), None),
    ],
    ids=str,
)
def test_gradients_are_sums_over_every_rank_reduced_once(degrees, mesh, reshard):
    for seen in run_on_ranks(gradients_on_a_mesh, degrees.world_size, degrees, reshard):
        assert seen["mesh"] == mesh
        for number in range(3):
            assert seen[f"error {number}"] <= 1e-14, seen
        assert seen["counts 0"] == {"stage 7: ": 1}
        assert seen["counts 1"] == {"stage 7: ": 1, "stage 7: inner.0": 1, "stage 7: inner.1": 1}
        assert seen["counts 2"] == {"stage 7: ": 1, "stage 7: inner.0+inner.1": 1}
        inner = ["inner.0.weight", "inner.1.weight", "inner.1.bias"]
        assert seen["parameters 0"] == {"stage 7: ": ["scale", *inner]}
        assert seen["parameters 1"] == {
            "stage 7: ": ["scale"],
            "stage 7: inner.0": inner[:1],
            "stage 7: inner.1": inner[1:],
        }
        assert seen["parameters 2"] == {"stage 7: ": ["scale"], "stage 7: inner.0+inner.1": inner}
        assert seen["units 0"] == [""]
        assert seen["units 1"] == seen["units 2"] == ["", "inner.0", "inner.1"]


def mesh_of_parameters() -> tuple[Any, Any]:
    replicated = fsdp_mesh(build_mesh(Degrees(dp_replicate=2, dp_shard=2)))
    return replicated.mesh_dim_names, replicated.mesh.tolist()


@pytest.mark.ranks
def test_replicas_are_the_outer_axis_of_the_mesh_of_parameters():
    assert set(map(str, run_on_ranks(mesh_of_parameters, 4))) == {
        str((("dp_replicate", "fsdp"), [[0, 1], [2, 3]]))
    }


def empty_root() -> dict[str, int]:
    mesh = build_mesh(Degrees(dp_shard=2))
    counter = ReductionCounter()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    apply_fsdp(
        model,
        mesh,
        units=[["0"], ["1"]],
        reshard_after_forward=None,
        precision=Precision(),
        counter=counter,
    )
    assert isinstance(model, FSDPModule)  # although it owns nothing
    for is_last in (False, True):
        # Only a root passes the switch on to all units.
        model.set_requires_gradient_sync(is_last)
        model(rows_of(mesh.get_rank())).sum().backward()
    return counter.counts


@pytest.mark.ranks
def test_a_root_that_owns_nothing_still_keeps_the_others_from_reducing_twice():
    assert run_on_ranks(empty_root, 2) == [{ROOT_UNIT: 0, "0": 1, "1": 1}] * 2
