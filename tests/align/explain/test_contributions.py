from __future__ import annotations

from pathlib import Path

import pytest

from paralign.align.verdict import Finding
from tests.align.explain.scene import Scene, Tensors, scaled, total

TOKENS = [[3, 5, 7], [2, 2, 9], [4, 4, 4], [1, 8, 3], [6, 2, 2], [1, 1, 1]]
ALL = sum(map(sum, TOKENS))


@pytest.fixture
def scene() -> Scene:
    return Scene({"dp": 2, "cp": 3})


def explain(scene: Scene, tmp_path: Path, made) -> Finding:
    """Record every contribution, and gradients that ``made(rank)`` puts together from them."""

    def change(rank, run):
        changed = scene.rank(made(rank))
        changed.micro = scene.contributions[rank]
        return changed

    (finding,) = scene.explain(tmp_path, change)
    assert finding.evidence["tensors"] == 4, "small tensors follow the recipe of large ones"
    assert finding.evidence["eps_after"] < 100
    return finding


def parts(scene: Scene, weight) -> Tensors:
    """Return the sum of all contributions, each with its weight."""
    return total(
        [
            scaled(scene.contributions[rank][number], weight(rank, number))
            for rank in range(6)
            for number in range(3)
        ]
    )


def test_a_lost_micro_batch_is_named(scene: Scene, tmp_path: Path) -> None:
    finding = explain(scene, tmp_path, lambda r: parts(scene, lambda _, n: float(n != 1)))
    assert (finding.component, finding.cause) == ("backward", "missing_contribution")
    assert finding.axes == []
    assert finding.evidence["micro_batches"] == [1]


def test_the_last_micro_batch_added_after_the_reduction(scene: Scene, tmp_path: Path) -> None:
    finding = explain(
        scene,
        tmp_path,
        lambda own: parts(scene, lambda rank, n: float(n != 2 or rank == own)),
    )
    assert finding.cause == "missing_contribution"
    assert finding.axes == ["dp", "cp"]
    assert finding.evidence["micro_batches"] == [2]


def test_what_one_rank_computed_is_in_nobodys_sum(scene: Scene, tmp_path: Path) -> None:
    finding = explain(scene, tmp_path, lambda _: parts(scene, lambda rank, n: float(rank < 3)))
    assert (finding.component, finding.cause) == ("reduction", "missing_contribution")
    assert finding.axes == ["dp"]
    assert finding.evidence["ranks"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("weight", "axes"),
    [
        (lambda rank, n: ALL / 18 / TOKENS[rank][n], ["dp", "cp"]),
        (lambda rank, n: ALL / 6 / sum(TOKENS[rank]), ["dp", "cp"]),
        (lambda rank, n: ALL / 3 / sum(own[n] for own in TOKENS), []),
        (
            lambda rank, n: ALL / 2 / sum(sum(TOKENS[r]) for r in range(6) if r // 3 == rank // 3),
            ["dp"],
        ),
    ],
    ids=["micro-batch of a rank", "rank", "micro-batch", "dp rank"],
)
def test_a_mean_of_means(scene: Scene, tmp_path: Path, weight, axes: list[str]) -> None:
    finding = explain(scene, tmp_path, lambda _: parts(scene, weight))
    assert (finding.component, finding.cause) == ("loss", "token_weighting")
    assert finding.axes == axes
    assert sum(finding.evidence["token_shares"]) == pytest.approx(1.0)


def test_one_rank_that_weighs_more(scene: Scene, tmp_path: Path) -> None:
    finding = explain(scene, tmp_path, lambda _: parts(scene, lambda r, n: 1.5 if r == 4 else 1.0))
    assert (finding.cause, finding.evidence["rank"]) == ("single_rank", 4)
    assert finding.evidence["weights"] == [1.5]


def test_micro_batches_that_are_scaled_again_and_again(scene: Scene, tmp_path: Path) -> None:
    finding = explain(scene, tmp_path, lambda _: parts(scene, lambda r, n: 2.0 ** (2 - n)))
    assert (finding.component, finding.cause) == ("backward", "constant_factor")
    assert finding.evidence["weights_by_micro_batch"] == {"0": 4.0, "1": 2.0, "2": 1.0}


def test_weights_without_a_meaning_prove_nothing(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        changed = scene.rank(parts(scene, lambda r, n: 1 + 0.1 * r + 0.01 * n * r))
        changed.micro = scene.contributions[rank]
        return changed

    (finding,) = scene.explain(tmp_path, change)
    assert finding.cause == "unknown"


@pytest.mark.parametrize("lost", [5, 1])
def test_contributions_that_are_multiples_do_not_hide_the_others(
    scene: Scene, tmp_path: Path, lost: int
) -> None:
    """Two ranks happen to see one token alone, as slices of blanks do: a weight for both is known.

    One rank is in nobody's sum; if it is one of the two, its other contributions tell.
    """
    scene.contributions[1][0] = scaled(scene.contributions[0][1], 0.25)
    finding = explain(scene, tmp_path, lambda r: parts(scene, lambda rank, n: float(rank != lost)))
    assert (finding.component, finding.cause) == ("reduction", "missing_contribution")
    assert finding.evidence["ranks"] == [lost]


def test_a_mean_that_counts_a_part_without_tokens(scene: Scene, tmp_path: Path) -> None:
    """One micro-batch of one rank has no token; it adds nothing, and N counts it all the same."""
    scene.contributions[4][1] = scaled(scene.contributions[4][1], 0.0)
    total_tokens = ALL - TOKENS[4][1]

    def weight(rank: int, number: int) -> float:
        return total_tokens / 18 / TOKENS[rank][number]

    finding = explain(scene, tmp_path, lambda _: parts(scene, weight))
    assert (finding.component, finding.cause) == ("loss", "token_weighting")
    assert finding.axes == ["dp", "cp"]
