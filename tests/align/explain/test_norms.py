from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.align.explain.scene import Scene

STAGES = {"embed.weight": 0, "layers.0.w": 0, "layers.1.w": 1, "norm.weight": 1}


def norm_of(scene: Scene, *names: str) -> float:
    right = scene.right()
    return math.sqrt(sum(float(right[name].square().sum()) for name in names or right))


@pytest.fixture
def scene() -> Scene:
    return Scene({"pp": 2, "dp": 3})


def test_each_stage_reports_its_own_norm(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        stage = scene.coordinates[rank][0]
        run.norm = norm_of(scene, *(n for n, s in STAGES.items() if s == stage))

    (finding,) = scene.explain(tmp_path, change, pp_stage=STAGES.__getitem__)
    assert (finding.component, finding.cause) == ("clipping", "wrong_norm")
    assert finding.axes == ["pp"]
    assert finding.evidence["eps_after"] < 100


def test_replicas_that_count_again(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.norm = math.sqrt(3) * norm_of(scene)

    (finding,) = scene.explain(tmp_path, change, pp_stage=STAGES.__getitem__)
    assert (finding.cause, finding.axes) == ("wrong_norm", ["dp"])


def test_a_parameter_that_is_left_out(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.norm = norm_of(scene, "embed.weight", "layers.0.w", "layers.1.w")

    (finding,) = scene.explain(tmp_path, change, pp_stage=STAGES.__getitem__)
    assert (finding.cause, finding.axes) == ("wrong_norm", [])
    assert finding.evidence["left_out"] == "norm.weight"


def test_the_norm_after_clipping(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.norm = norm_of(scene) * 0.05 / (norm_of(scene) + 1e-6)

    facts = {"clip": 0.05}
    (finding,) = scene.explain(
        tmp_path, change, pp_stage=STAGES.__getitem__, facts=facts, reference={"facts": facts}
    )
    assert (finding.component, finding.cause) == ("clipping", "reported_value")


def test_a_norm_without_a_meaning_is_still_named(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.norm = 1.2345 * norm_of(scene)

    (finding,) = scene.explain(tmp_path, change, pp_stage=STAGES.__getitem__)
    assert (finding.cause, finding.evidence["eps_after"]) == ("wrong_norm", None)


def test_a_norm_that_is_right_for_wrong_gradients_is_no_cause(scene: Scene, tmp_path: Path) -> None:
    (finding,) = scene.explain(
        tmp_path, lambda rank, run: scene.rank(scene.sum_over(scene.group(rank, "pp")))
    )
    assert finding.cause == "missing_reduction"
