from __future__ import annotations

from pathlib import Path

import pytest

from tests.align.explain.scene import LOSS, TOKENS, Scene, scaled


@pytest.fixture
def scene() -> Scene:
    return Scene({"pp": 2, "cp": 3})


@pytest.mark.parametrize(
    ("factor", "axes"), [(1 / 2, ["pp"]), (1 / 3, ["cp"]), (3, ["cp"]), (0.77, [])]
)
def test_a_loss_that_is_only_shown_wrong(
    scene: Scene, tmp_path: Path, factor: float, axes: list[str]
) -> None:
    def change(rank, run):
        run.loss = LOSS * factor

    (finding,) = scene.explain(tmp_path, change, facts={"num_microbatches": 1})
    assert (finding.component, finding.cause) == ("loss", "reported_value")
    assert finding.axes == axes
    assert finding.evidence["parallel"] == LOSS * factor


def test_a_count_that_is_only_shown_wrong(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        run.tokens = TOKENS - 1

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("data", "reported_value")


def test_tokens_that_are_there_several_times(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        other = Scene({"pp": 2, "cp": 3}, seed=7)
        changed = scene.rank(other.right())
        changed.tokens, changed.loss = 3 * TOKENS, LOSS + 0.1
        return changed

    findings = scene.explain(tmp_path, change, facts={"num_microbatches": 1})
    assert (findings[0].cause, findings[0].axes) == ("full_sequence", ["cp"])


def test_a_loss_that_nothing_explains_waits_for_the_gradients(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        grads = scene.sum_over(scene.group(rank, "pp"))
        changed = scene.rank(grads)
        changed.loss = LOSS * 1.01
        return changed

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("missing_reduction", ["cp"])


def test_an_unknown_loss_says_so(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        changed = scene.rank(Scene({"pp": 2, "cp": 3}, seed=9).right())
        changed.loss = LOSS * 1.01
        return changed

    (finding,) = scene.explain(tmp_path, change)
    assert (finding.component, finding.cause) == ("loss", "unknown")


def test_a_loss_divided_by_masked_tokens_as_well(scene: Scene, tmp_path: Path) -> None:
    rows, length = 1, TOKENS + 11  # more places than valid tokens
    factor = TOKENS / (rows * length)

    def change(rank, run):
        changed = scene.rank(scaled(scene.right(), factor))
        changed.loss = LOSS * factor
        return changed

    facts = {"num_microbatches": 1, "global_batch": rows, "seq_len": length}
    (finding,) = scene.explain(tmp_path, change, facts=facts)
    assert (finding.component, finding.cause, finding.axes) == ("loss", "token_weighting", [])
