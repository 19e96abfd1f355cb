from __future__ import annotations

from pathlib import Path

import pytest

from paralign.align import compare
from paralign.align.verdict import Finding
from tests.align.explain.scene import Run, Scene, scaled, total, write


@pytest.fixture
def scene() -> Scene:
    return Scene({"pp": 2, "dp": 2})


def reference(scene: Scene) -> Run:
    """Return the run on one device: every micro-batch's gradient in one piece."""
    run = scene.rank()
    run.micro = [
        total([scene.contributions[rank][number] for rank in range(scene.world_size)])
        for number in range(scene.micro_batches)
    ]
    return run


def lose(scene: Scene, ranks: tuple[int, ...], numbers: tuple[int, ...], *, noise: float = 0.0):
    """Return what breaks a run in which these ranks add nothing in these micro-batches."""
    made = [
        [
            scaled(one, 0.0 if rank in ranks and number in numbers else 1.0)
            for number, one in enumerate(scene.contributions[rank])
        ]
        for rank in range(scene.world_size)
    ]
    whole = total([total(rank) for rank in made])

    def change(rank: int, run: Run) -> Run:
        run = scene.rank({n: g + noise * g.sin() for n, g in whole.items()})
        run.micro = made[rank]
        return run

    return change


def explain(scene: Scene, tmp_path: Path, change) -> Finding:
    write(tmp_path / "ref", [reference(scene)], {}, facts={"num_microbatches": 3})
    runs = [change(rank, scene.rank()) for rank in range(scene.world_size)]
    write(tmp_path / "par", runs, scene.mesh, facts={"num_microbatches": 3})
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]


@pytest.mark.parametrize("numbers", [(2,), (0, 1)])
def test_a_part_of_a_micro_batch_that_was_never_computed(
    scene: Scene, tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    finding = explain(scene, tmp_path, lose(scene, (2, 3), numbers))
    assert (finding.component, finding.cause) == ("backward", "missing_contribution")
    assert finding.evidence["micro_batches"] == list(numbers)
    assert finding.evidence["ranks"] == [2, 3]
    assert finding.evidence["eps_after"] < 20 < finding.evidence["eps_before"]


def test_what_is_off_besides_is_not_explained_by_it(scene: Scene, tmp_path: Path) -> None:
    finding = explain(scene, tmp_path, lose(scene, (2, 3), (2,), noise=1e-3))
    assert finding.cause == "unknown"
