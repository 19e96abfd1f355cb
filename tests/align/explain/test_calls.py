from __future__ import annotations

from pathlib import Path

import pytest

from paralign.align import compare
from paralign.align.verdict import Finding
from tests.align.explain.scene import Run, Scene, write
from tests.align.explain.test_data import MESH, batch, share
from tests.align.explain.test_forward import after, output

LAYERS = ("embed", "layers.0", "layers.1", "norm")


def explain(
    tmp_path: Path, ran: list[str], *, grad_of_layer_0: float = 1.0, wrong: str = "layers.1"
) -> Finding:
    """Compare with a run that calls these modules; all outputs from ``wrong`` on are off."""
    scene = Scene(MESH)
    reference = scene.rank()
    reference.inputs = [batch()]
    right = {name: output(number) for number, name in enumerate(LAYERS)}
    reference.outputs = [right]
    write(tmp_path / "ref", [reference], {})
    runs: list[Run] = []
    for at in scene.coordinates:
        run = scene.rank(Scene(MESH, seed=5).right())
        run.grads["layers.0.w"] = grad_of_layer_0 * run.grads["layers.0.w"]
        run.inputs = [share(at)]
        rows, columns = slice(2 * at[0], 2 * at[0] + 2), slice(4 * at[1], 4 * at[1] + 4)
        made = {}
        for name in ran:
            value = right[name.partition("#")[0]]
            is_right = LAYERS.index(name.partition("#")[0]) < LAYERS.index(wrong)
            made[name] = value if is_right else after(value, 0)
        run.outputs = [{n: t[rows, columns].contiguous() for n, t in made.items()}]
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]


def test_a_layer_that_ran_twice(tmp_path: Path) -> None:
    finding = explain(tmp_path, ["embed", "layers.0", "layers.0#1", "layers.1", "norm"])
    assert (finding.component, finding.cause) == ("forward", "wrong_layer")
    assert finding.evidence["module"] == "layers.0"
    assert (finding.evidence["calls"], finding.evidence["calls_in_reference"]) == (2, 1)
    assert finding.tensor == "layers.1"


def test_a_layer_that_never_ran(tmp_path: Path) -> None:
    finding = explain(tmp_path, ["embed", "layers.1", "norm"], grad_of_layer_0=0.0)
    assert (finding.component, finding.cause) == ("forward", "wrong_layer")
    assert (finding.evidence["module"], finding.evidence["calls"]) == ("layers.0", 0)


@pytest.mark.parametrize("ran", [["embed", "layers.1", "norm"], list(LAYERS)])
def test_a_layer_with_a_gradient_ran_though_it_was_not_recorded(tmp_path: Path, ran) -> None:
    finding = explain(tmp_path, ran)
    assert (finding.component, finding.cause) == ("forward", "unknown")
    assert finding.tensor == "layers.1"


def test_layers_in_another_order(tmp_path: Path) -> None:
    finding = explain(tmp_path, ["embed", "layers.1", "layers.0", "norm"], wrong="layers.0")
    assert (finding.component, finding.cause) == ("forward", "wrong_layer")
    assert finding.evidence["module"] == "layers.1"
    assert finding.evidence["ran_before"] == "layers.0"
