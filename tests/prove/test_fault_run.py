from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paralign.prove.fault_run import FaultRun
from tests.parity import make_config


class Thing:
    shared = "of the class"


@pytest.fixture
def run():
    built = []

    def build():
        built.append(nn.Linear(2, 2))
        return built[-1]

    mesh: Any = SimpleNamespace(mesh_dim_names=("pp", "cp"), get_coordinate=lambda: [1, 0])
    return FaultRun(
        make_config(),
        mesh,
        build=build,
        parts=lambda program: ([program], dict(program.named_parameters())),
    )


def test_a_run_knows_its_parts_and_where_it_is(run):
    assert run.modules == [run.program]
    assert set(run.parameters) == {"weight", "bias"}
    assert run.coordinate == {"pp": 1, "cp": 0}


def test_rebuilding_replaces_program_and_parts(run):
    before = run.program
    run.rebuild()
    assert run.program is not before
    assert run.modules == [run.program]
    assert run.parameters["weight"] is run.program.weight


def test_patches_are_taken_back_last_first(run):
    thing = Thing()
    old = run.program.weight
    run.patch(thing, "shared", "of the object")
    run.patch(thing, "shared", "once more")
    run.patch(Thing, "shared", "replaced")
    run.patch(run.program, "forward", lambda x: x)
    run.patch(run.program, "weight", nn.Parameter(old.detach().clone()))
    assert (thing.shared, Thing.shared) == ("once more", "replaced")
    run.undo()
    assert vars(thing) == {}
    assert Thing.shared == "of the class"
    assert "forward" not in vars(run.program)
    assert run.program.weight is old


def test_a_name_that_does_not_exist_is_refused(run):
    with pytest.raises(AttributeError):
        run.patch(Thing(), "shred", 1)


def test_hooks_are_kept(run):
    run.on_batch(len)
    run.after_backward(list)
    run.before_step(id)
    run.after_step(id)
    hooks = run.hooks
    assert (hooks.on_batch, hooks.after_backward) == ([len], [list])
    assert (hooks.before_step, hooks.after_step) == ([id], [id])
