from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paralign.align import compare
from paralign.align.explain.candidates import names_cause, names_place
from paralign.align.explain.factors import name_source
from paralign.align.explain.proof import Proof
from paralign.align.trace import Kind
from tests.align.explain.scene import Scene, scaled
from tests.align.explain.test_context import mesh_of
from tests.align.synthetic import toy_step, with_kind, write_trace

NAME = "embed.weight"


def test_a_factor_on_all_gradients(tmp_path: Path) -> None:
    scene = Scene({"dp": 5, "cp": 2})
    (finding,) = scene.explain(tmp_path, lambda r, run: scene.rank(scaled(scene.right(), 1 / 5)))
    assert (finding.component, finding.cause) == ("reduction", "constant_factor")
    assert finding.axes == ["dp"]
    assert finding.evidence["factor"] == "1/5"
    assert finding.evidence["eps_after"] < 10


def test_sizes_that_are_equal_are_all_listed(tmp_path: Path) -> None:
    scene = Scene({"dp": 2, "cp": 2}, micro_batches=2)
    (finding,) = scene.explain(tmp_path, lambda r, run: scene.rank(scaled(scene.right(), 0.5)))
    assert finding.separate_by is not None
    assert finding.axes == []
    for place in (["dp"], ["cp"]):
        assert names_cause(finding, "reduction", place, "constant_factor")
    assert names_cause(finding, "backward", [], "constant_factor")
    assert not names_place(finding, "reduction", ["dp", "cp"])
    assert not names_cause(finding, "loss", [], "constant_factor")


def test_a_factor_on_some_gradients_is_a_reduction_done_twice(tmp_path: Path) -> None:
    scene = Scene({"dp": 3, "cp": 2}, micro_batches=5)

    def change(rank, run):
        return scene.rank(scaled(scene.right(), 3, "norm.weight"))

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("reduction", "double_reduction")
    assert (finding.axes, finding.tensor) == (["dp"], "norm.weight")
    assert names_cause(finding, "backward", [], "constant_factor")


@pytest.mark.parametrize("factor", [15 / 4, 2.000000002, -1.0])
def test_factors_that_are_no_size(tmp_path: Path, factor: float) -> None:
    scene = Scene({"dp": 2, "cp": 3})
    (finding,) = scene.explain(tmp_path, lambda r, run: scene.rank(scaled(scene.right(), factor)))
    assert (finding.component, finding.cause) == ("backward", "constant_factor")
    told = finding.evidence["factor"]
    assert float(Fraction(told)) == pytest.approx(factor, rel=1e-11)
    assert finding.candidates == []


def test_contributions_tell_a_double_sum_from_a_wrong_loss(tmp_path: Path) -> None:
    scene = Scene({"dp": 2, "cp": 3})

    def twice(rank, run):
        changed = scene.rank(scaled(scene.right(), 2))
        changed.micro = scene.contributions[rank]
        return changed

    (finding,) = scene.explain(tmp_path, twice)
    assert (finding.cause, finding.axes) == ("double_reduction", ["dp"])
    assert finding.candidates == []

    def too_large(rank, run):
        changed = scene.rank(scaled(scene.right(), 2))
        changed.micro = [scaled(part, 2) for part in scene.contributions[rank]]
        return changed

    (finding,) = scene.explain(tmp_path, too_large)
    assert (finding.component, finding.cause) == ("backward", "constant_factor")
    assert finding.candidates == []


def test_a_factor_of_some_gradients_may_come_after_a_right_sum(tmp_path: Path) -> None:
    """Contributions that add up leave two places: the reduction, and what is done with its sum."""
    scene = Scene({"dp": 2, "cp": 3})

    def change(rank, run):
        changed = scene.rank(scaled(scene.right(), 2, "layers.0.w"))
        changed.micro = scene.contributions[rank]
        return changed

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("double_reduction", ["dp"])
    assert names_cause(finding, "backward", [], "constant_factor")
    assert any("after its reduction" in candidate for candidate in finding.candidates)


def test_a_parameter_with_two_names_is_reduced_over_pp(tmp_path: Path) -> None:
    """A stage knows one name of it; the reference, which has both, tells that they are one."""
    right = toy_step()
    twice = with_kind(right, Kind.GRAD, **{NAME: 2 * right[Kind.GRAD, NAME]})
    for aliases in ({}, {NAME: ("head.weight",)}):
        write_trace(tmp_path / "ref", [right], aliases=aliases)
        write_trace(tmp_path / "par", [twice], mesh={"pp": 2})
        (finding, *_) = compare(tmp_path / "ref", tmp_path / "par").findings
        assert finding.tensor == NAME
        assert names_place(finding, "reduction", ["pp"]) is bool(aliases)


def test_the_loss_is_what_is_scaled_if_it_has_the_factor_too(tmp_path: Path) -> None:
    scene = Scene({"dp": 2, "cp": 3})

    def change(rank, run):
        changed = scene.rank(scaled(scene.right(), 1 / 3))
        changed.loss = run.loss / 3
        return changed

    (finding,) = scene.explain(tmp_path, change, facts={"num_microbatches": 7})
    assert (finding.component, finding.cause) == ("loss", "constant_factor")
    assert finding.axes == ["cp"]
    assert finding.evidence["gradients"] == 4


@pytest.mark.parametrize("ep", [3, 6])
@pytest.mark.parametrize("experts", [True, False])
def test_all_experts_with_a_factor_of_ep(ep: int, experts: bool) -> None:
    """Also where the ranks of ep are those of dp_shard x tp, which have the size 6 too."""
    mesh = mesh_of(pp=2, dp_shard=3, tp=2, ep=ep)
    context: Any = SimpleNamespace(mesh=mesh, sizes=dict(mesh.sizes))
    proof = Proof("constant_factor", 0.0, detail={"factor": str(ep)})
    name_source(context, proof, everywhere=False, experts=experts)
    assert (proof.axes == ("ep",)) is experts
    assert ("all that ep cuts" in proof.text) is experts
