from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from paralign.align import compare
from paralign.align.verdict import Finding
from tests.align.explain.scene import Run, Scene, Tensors, scaled, write
from tests.align.explain.test_data import MESH, batch, share
from tests.align.explain.test_forward import after, output

# In backward order: what attention gets, and what came before it.
GRADS = ("attention.core", "attention.wv", "attention.wq", "norm")


def explain(tmp_path: Path, parameters: Tensors | None = None, /, **changed: Tensor) -> Finding:
    """Compare with a run whose outputs are right, and whose gradients of these outputs are not.

    The gradients of its parameters are ``parameters``, or off in no way that has a name.
    """
    scene = Scene(MESH)
    right = {name: output(number) for number, name in enumerate(GRADS)}
    reference = scene.rank()
    reference.inputs, reference.outputs = [batch()], [{"x": output(9)}]
    reference.output_grads = [right]
    write(tmp_path / "ref", [reference], {})
    runs: list[Run] = []
    made = right | {name.replace("_", "."): value for name, value in changed.items()}
    for at in scene.coordinates:
        run = scene.rank(Scene(MESH, seed=5).right() if parameters is None else parameters)
        rows, columns = slice(2 * at[0], 2 * at[0] + 2), slice(4 * at[1], 4 * at[1] + 4)
        run.inputs, run.outputs = [share(at)], [{"x": output(9)[rows, columns].contiguous()}]
        run.output_grads = [{n: t[rows, columns].contiguous() for n, t in made.items()}]
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]


def test_keys_without_the_gradients_of_other_ranks_queries(tmp_path: Path) -> None:
    finding = explain(tmp_path, attention_wv=after(output(1), 0, 4), norm=after(output(3), 0))
    assert (finding.component, finding.cause) == ("backward", "missing_reduction")
    assert (finding.tensor, finding.axes) == ("attention.wv", ["cp"])
    assert finding.separate_by is not None  # a pattern, not a proof


@pytest.mark.parametrize("wrong", [(0, 3), (0, None), (1, 4)])
def test_other_positions_show_no_slice(tmp_path: Path, wrong: tuple[int, int | None]) -> None:
    finding = explain(tmp_path, attention_wv=after(output(1), *wrong), norm=after(output(3), 0))
    assert (finding.cause, finding.tensor) == ("unknown", "attention.wv")


def test_a_slice_of_everything_around_it_is_not_the_keys(tmp_path: Path) -> None:
    changed = {
        name.replace(".", "_"): after(output(n), 0, 4) for n, name in enumerate(GRADS[1:3], 1)
    }
    assert explain(tmp_path, **changed, attention_core=after(output(0), 0, 4)).cause == "unknown"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x: 3 * x, "constant_factor"),
        (lambda x: x.bfloat16().double(), "precision"),
        (lambda x: x.flip(2), "permuted_shards"),
        (lambda x: 0 * x, "missing_contribution"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_first_in_the_backward_names_the_module(tmp_path: Path, change, cause: str) -> None:
    finding = explain(tmp_path, attention_wq=change(output(2)), norm=after(output(3), 0))
    assert (finding.component, finding.cause, finding.tensor) == ("backward", cause, "attention.wq")


def rows_turned_round() -> Tensors:
    grads = Scene(MESH).right()
    return {**grads, "layers.0.w": grads["layers.0.w"].flip(0)}


def test_an_order_is_told_where_it_arose(tmp_path: Path) -> None:
    """The axes are those of the exchange; no axis cuts the parameter whose rows it turned round."""
    finding = explain(tmp_path, rows_turned_round(), attention_wq=output(2).flip(2))
    assert (finding.cause, finding.tensor) == ("permuted_shards", "attention.wq")
    assert finding.axes == ["cp"]


def test_an_order_of_rows_alone_stays_with_the_parameter(tmp_path: Path) -> None:
    finding = explain(tmp_path, rows_turned_round(), attention_wq=after(output(2), 0))
    assert (finding.cause, finding.tensor) == ("permuted_shards", "layers.0.w")


def test_gradients_that_say_what_is_wrong_are_asked_first(tmp_path: Path) -> None:
    finding = explain(tmp_path, scaled(Scene(MESH).right(), 3.0), attention_wq=output(2).flip(2))
    assert finding.cause == "constant_factor"
    assert finding.evidence["tensors"] == 4
