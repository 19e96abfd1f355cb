from __future__ import annotations

from pathlib import Path

import pytest

from tests.align.explain.scene import Scene, scaled

MESH = {"dp": 2, "cp": 3}


@pytest.fixture
def scene() -> Scene:
    return Scene(MESH)


def test_right_runs_are_aligned(scene: Scene, tmp_path: Path) -> None:
    report = scene.compare(tmp_path)
    assert (report.verdict, report.findings) == ("aligned", [])


@pytest.mark.parametrize("missing", [("cp",), ("dp",), ("dp", "cp")])
def test_replicas_that_add_up_to_the_reference(
    scene: Scene, tmp_path: Path, missing: tuple[str, ...]
) -> None:
    kept = [axis for axis in MESH if axis not in missing]
    (finding,) = scene.explain(
        tmp_path, lambda rank, run: scene.rank(scene.sum_over(scene.group(rank, *kept)))
    )
    assert (finding.component, finding.cause) == ("reduction", "missing_reduction")
    assert finding.axes == list(missing)
    assert finding.evidence["tensors"] == 4
    assert finding.evidence["eps_after"] < 10 < 1e12 < finding.evidence["eps_before"]
    assert finding.evidence["operation"] == "sum"
    assert finding.candidates == []


def test_replicas_whose_mean_is_the_reference(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        return scene.rank(scaled(scene.sum_over(scene.group(rank, "dp")), 3))

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("missing_reduction", ["cp"])
    assert finding.evidence["operation"] == "mean"


def test_a_sum_over_another_axis_that_has_summed_already(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        return scene.rank(scaled(scene.sum_over(scene.group(rank, "dp")), 2))

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("wrong_group", ["cp"])
    assert finding.evidence["reduced_over"] == ["dp"]


def test_equal_sizes_leave_mean_and_wrong_group_open(tmp_path: Path) -> None:
    scene = Scene({"dp": 2, "cp": 2})

    def change(rank, run):
        return scene.rank(scaled(scene.sum_over(scene.group(rank, "dp")), 2))

    (finding,) = scene.explain(tmp_path, change)
    assert [text.split(":")[0] for text in finding.candidates] == [
        "reduction/missing_reduction over cp",
        "reduction/wrong_group over cp",
    ]
    assert finding.separate_by is not None


def test_groups_that_do_not_follow_the_mesh(scene: Scene, tmp_path: Path) -> None:
    groups = [[0, 4, 5], [1, 2, 3]]

    def change(rank, run):
        return scene.rank(scene.sum_over(next(g for g in groups if rank in g)))

    (finding,) = scene.explain(tmp_path, change)
    assert finding.cause == "wrong_group"
    assert finding.evidence["groups"] == groups


def test_what_a_few_lack_besides_is_a_cause_of_its_own(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        grads = scene.sum_over(scene.group(rank, "dp"))
        grads["norm.weight"] = scene.local(rank)["norm.weight"]
        return scene.rank(grads)

    all_over_cp, norm_over_dp = scene.explain(tmp_path, change)
    assert (all_over_cp.cause, all_over_cp.axes) == ("missing_reduction", ["cp"])
    assert (norm_over_dp.cause, norm_over_dp.axes) == ("missing_reduction", ["dp"])
    assert norm_over_dp.tensor == "norm.weight"
    assert norm_over_dp.evidence["also_missing"] == ["cp"]


def test_noise_on_the_replicas_is_no_missing_sum(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        grads = scene.right()
        grads["layers.0.w"] = grads["layers.0.w"] * (1 + 1e-6 * rank)
        return scene.rank(grads)

    findings = scene.explain(tmp_path, change)
    assert "missing_reduction" not in {finding.cause for finding in findings}
