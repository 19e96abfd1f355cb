from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.align.explain.scene import Scene, scaled


@pytest.fixture
def scene() -> Scene:
    return Scene({"dp": 2, "cp": 3})


def changed(scene: Scene, name: str, edit):
    """Return a change that edits one gradient on every rank, ``edit(rank, gradient)``."""

    def change(rank, run):
        grads = scene.right()
        grads[name] = edit(rank, grads[name])
        return scene.rank(grads)

    return change


def test_layers_whose_gradients_changed_places(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        grads = scene.right()
        first, second = grads["layers.0.w"], grads["layers.1.w"]
        return scene.rank({**grads, "layers.0.w": second, "layers.1.w": first})

    (finding,) = scene.explain(tmp_path, change)
    assert finding.cause == "wrong_layer"
    assert finding.evidence["tensors"] == 2


def test_rows_in_another_order(scene: Scene, tmp_path: Path) -> None:
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    (finding,) = scene.explain(
        tmp_path, changed(scene, "layers.0.w", lambda rank, grad: grad[order])
    )
    assert (finding.cause, finding.tensor) == ("permuted_shards", "layers.0.w")
    assert (finding.evidence["dim"], finding.evidence["order"]) == (0, order.tolist())


def test_zeros_where_values_are_due(scene: Scene, tmp_path: Path) -> None:
    def lose(rank, grad):
        return torch.cat([grad[:4], torch.zeros_like(grad[4:])])

    (finding,) = scene.explain(tmp_path, changed(scene, "layers.0.w", lose))
    assert finding.cause == "missing_contribution"
    assert finding.evidence["zero_elements"] == 2 * 8


def test_a_gradient_that_never_came(scene: Scene, tmp_path: Path) -> None:
    (finding,) = scene.explain(
        tmp_path, changed(scene, "norm.weight", lambda rank, grad: torch.zeros_like(grad))
    )
    assert (finding.component, finding.cause) == ("backward", "missing_contribution")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_that_were_rounded(scene: Scene, tmp_path: Path, dtype: torch.dtype) -> None:
    (finding,) = scene.explain(
        tmp_path,
        lambda rank, run: scene.rank({n: g.to(dtype).double() for n, g in run.grads.items()}),
    )
    assert (finding.component, finding.cause) == ("backward", "precision")
    assert f"torch.{finding.evidence['dtype']}" == str(dtype)
    assert finding.candidates == []


@pytest.mark.parametrize(
    ("mesh", "component"), [({"dp": 2, "cp": 3}, "reduction"), ({"pp": 2}, "backward")]
)
def test_gradients_that_were_added_up_in_a_narrow_dtype(
    tmp_path: Path, mesh: dict[str, int], component: str
) -> None:
    scene = Scene(mesh)

    def narrow(rank, run):
        sums = {n: torch.zeros_like(g, dtype=torch.bfloat16) for n, g in run.grads.items()}
        for other in range(scene.world_size):
            for name, grad in scene.local(other).items():
                sums[name] += grad.bfloat16()
        return scene.rank({n: g.double() for n, g in sums.items()})

    finding = scene.explain(tmp_path, narrow)[0]
    assert (finding.component, finding.cause, finding.axes) == (component, "precision", [])
    assert finding.evidence["dtype"] == "bfloat16"


def test_noise_of_a_narrow_dtype_is_only_a_candidate(scene: Scene, tmp_path: Path) -> None:
    def noisy(rank, run):
        noise = torch.Generator().manual_seed(3)
        draw = {n: torch.randn(g.shape, generator=noise).double() for n, g in run.grads.items()}
        return scene.rank({n: g * (1 + 1e-7 * draw[n]) for n, g in run.grads.items()})

    (finding,) = scene.explain(tmp_path, noisy)
    assert finding.cause == "precision"
    assert finding.evidence["representable"] is False
    assert finding.separate_by is not None


def test_one_rank_alone(scene: Scene, tmp_path: Path) -> None:
    (finding,) = scene.explain(
        tmp_path,
        lambda rank, run: scene.rank(scaled(scene.right(), 1.5)) if rank == 4 else None,
    )
    assert (finding.cause, finding.evidence["rank"]) == ("single_rank", 4)


def test_an_error_without_a_meaning(scene: Scene, tmp_path: Path) -> None:
    def other(rank, grad):
        return grad + torch.linspace(0.1, 0.9, grad.numel()).reshape(grad.shape).double()

    (finding,) = scene.explain(tmp_path, changed(scene, "layers.0.w", other))
    assert (finding.component, finding.cause) == ("backward", "unknown")
    assert "outputs" in finding.fix


def test_two_causes_are_two_findings(scene: Scene, tmp_path: Path) -> None:
    def change(rank, run):
        grads = scene.sum_over(scene.group(rank, "dp"))
        grads["norm.weight"] = 5 * scene.right()["norm.weight"]
        return scene.rank(grads)

    found = {f.cause: f for f in scene.explain(tmp_path, change)}
    assert set(found) == {"missing_reduction", "constant_factor"}
    assert found["constant_factor"].tensor == "norm.weight"


def test_a_small_error_beside_a_proven_cause_is_not_called_noise(
    scene: Scene, tmp_path: Path
) -> None:
    def change(rank, run):
        grads = scaled(scene.right(), 2.0, "layers.0.w")
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(grads["layers.1.w"].shape, generator=generator, dtype=torch.float64)
        grads["layers.1.w"] = grads["layers.1.w"] * (1 + 4e-3 * noise)
        return scene.rank(grads)

    findings = scene.explain(tmp_path, change)
    assert [finding.cause for finding in findings][1:] == ["unknown"]
    assert findings[0].tensor == "layers.0.w"
