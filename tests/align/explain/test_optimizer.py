from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.align.explain.scene import Scene, step


@pytest.fixture
def scene() -> Scene:
    return Scene({"dp": 2})


@pytest.mark.parametrize(
    ("changed", "option", "value"),
    [
        ({"lr": 2e-2}, "lr", 2e-2),
        ({"weight_decay": 0.0}, "weight_decay", 0.0),
        ({"weight_decay": 0.3}, "weight_decay", 0.3),
        ({"step": 2}, "step", 2.0),
    ],
)
def test_an_update_of_other_options(
    scene: Scene, tmp_path: Path, changed: dict[str, float], option: str, value: float
) -> None:
    def change(rank, run):
        step(run, **changed)

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("optimizer", "different_config")
    assert finding.evidence["option"] == option
    assert finding.evidence["value"] == pytest.approx(value, rel=1e-3, abs=1e-9)


def test_another_eps(scene: Scene, tmp_path: Path) -> None:
    (finding,) = scene.explain(tmp_path, lambda rank, run: step(run, eps=1e-5))
    assert (finding.cause, finding.evidence["option"]) == ("different_config", "eps")
    assert "eps=1e-05 instead of 1e-08" in finding.evidence["formula"]


def test_a_step_that_was_counted_before(scene: Scene, tmp_path: Path) -> None:
    (finding,) = scene.explain(tmp_path, lambda rank, run: step(run, step=2, shown_step=2))
    assert (finding.component, finding.cause) == ("state", "stale")
    assert (finding.evidence["reference"], finding.evidence["parallel"]) == (1.0, 2.0)


def test_a_parameter_that_the_optimizer_wrote_elsewhere(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.after["norm.weight"] = run.params["norm.weight"]

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("optimizer", "stale")
    assert finding.tensor == "norm.weight"


def test_a_parameter_that_the_optimizer_does_not_know(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.after["norm.weight"] = run.params["norm.weight"]
        for state in ("exp_avg", "exp_avg_sq", "step"):
            del run.moments[state, "norm.weight"]

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("optimizer", "missing_contribution")


def test_one_rank_that_skips_the_step(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        if rank == 1:
            run.after = dict(run.params)

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("optimizer", "single_rank")
    assert finding.evidence["rank"] == 1


def test_clipping_twice_is_seen_in_the_moments(scene: Scene, tmp_path: Path) -> None:
    facts = {"clip": 1e9}

    def change(rank, run):
        for (state, name), value in list(run.moments.items()):
            if state != "step":
                run.moments[state, name] = value / (8 if state == "exp_avg" else 64)

    (finding,) = scene.explain(tmp_path, change, facts=facts, reference={"facts": facts})
    assert (finding.component, finding.cause) == ("clipping", "constant_factor")
    assert finding.evidence["coefficient"] == pytest.approx(1 / 8)


def test_stages_that_clip_by_different_norms(tmp_path: Path) -> None:
    scene = Scene({"pp": 2, "dp": 2})
    stages = {"embed.weight": 0, "layers.0.w": 0, "layers.1.w": 1, "norm.weight": 1}
    limit, whole = 0.05, scene.rank().norm or 0.0
    facts = {"clip": limit}

    def clipped(run, norm):
        # The moments are made from clipped gradients; those recorded are from before.
        scale = limit / (norm + 1e-6)
        for (state, name), value in list(run.moments.items()):
            power = {"exp_avg": 1, "exp_avg_sq": 2}.get(state, 0)
            run.moments[state, name] = value * scale**power

    def change(rank, run):
        stage = scene.coordinates[rank][0]
        own = [g.square().sum() for n, g in run.grads.items() if stages[n] == stage]
        clipped(run, float(torch.stack(own).sum().sqrt()))

    right = scene.rank()
    clipped(right, whole)
    (finding,) = scene.explain(
        tmp_path, change, pp_stage=stages.__getitem__, facts=facts, reference={"facts": facts}
    )
    assert (finding.component, finding.cause) == ("clipping", "wrong_norm")
    assert finding.axes == ["pp"]
