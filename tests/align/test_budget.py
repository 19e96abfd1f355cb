from __future__ import annotations

from typing import Any

import pytest
import torch

from paralign.align import budget as budgets
from paralign.align.budget import EPS, Budget, Row, Yardstick


def test_eps_are_torchs() -> None:
    assert {name: torch.finfo(getattr(torch, name)).eps for name in EPS} == EPS


def test_every_row_has_a_name_and_a_reason() -> None:
    rows = [row for row in vars(budgets).values() if isinstance(row, Row)]
    rows += list(budgets.UNCALIBRATED_EPS.values())
    assert len(rows) == 15
    assert len({row.name for row in rows}) == len(rows)
    assert all(len(row.reason) > 15 and row.value > 0 for row in rows)
    assert set(budgets.UNCALIBRATED_EPS) == set(EPS) - {"float64"}


def test_fp64_rows() -> None:
    budget = Budget("float64", Yardstick.FP64)
    assert budget.tensor(after_step=False) == 100 * 2.0**-52
    assert budget.tensor(after_step=True) == 1e-12
    assert budget.scalar("loss", after_step=False) == 1e-14
    assert budget.scalar("norm", after_step=False) == 100 * 2.0**-52
    assert budget.scalar("loss", after_step=True) == 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_truth_allows_a_multiple_of_the_references_own_error(dtype: str) -> None:
    budget = Budget(dtype, Yardstick.TRUTH)
    eps = EPS[dtype]
    assert budget.tensor(after_step=False, own=4 * eps) == pytest.approx(14 * eps)
    # One tensor's own error may be small by luck; the median of its kind is not.
    lucky = budget.tensor(after_step=False, own=0.0, others=[0.0, 4 * eps, 5 * eps])
    assert lucky == pytest.approx((3 * 2 + 2) * eps)
    after = budget.tensor(after_step=True, own=eps, others=[eps, 50 * eps])
    assert after == pytest.approx(502 * eps)
    assert budget.scalar("loss", after_step=False, own=0.0) == pytest.approx(8 * eps)
    assert budget.scalar("loss", after_step=False, own=eps) == pytest.approx(11 * eps)


def test_uncalibrated_gates_gradients_only() -> None:
    budget = Budget("float32", Yardstick.UNCALIBRATED)
    assert budget.tensor(after_step=False) == 20 * EPS["float32"]
    assert budget.tensor(after_step=True) is None


def test_an_update_carries_the_rounding_of_its_parameters() -> None:
    budget = Budget("float64", Yardstick.FP64)
    assert budget.update_rounding(1.0, 1e-5, 2.0**-52) == pytest.approx(4e5 * 2.0**-52)
    assert budget.update_rounding(1.0, 0.0, 2.0**-52) == 0.0


def test_rounding_of_stored_parameters_really_stays_below_its_row() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(10_000, generator=generator, dtype=torch.float64)
    step = 1e-9 * torch.rand(10_000, generator=generator, dtype=torch.float64)
    stored = (p + step) - p
    error = float((stored - step).norm() / step.norm())
    allowed = Budget("float64", Yardstick.FP64).update_rounding(
        float(p.norm()), float(step.norm()), 2.0**-52
    )
    assert 1e-12 < error <= allowed


def test_zero_in_theory_is_one_eps_of_the_global_norm() -> None:
    assert Budget("float32", Yardstick.TRUTH).zero_in_theory(8.0) == 2.0**-20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_sets_no_budget(value: Any) -> None:
    tolerance = Budget("float32", Yardstick.TRUTH).tensor(after_step=False, own=value)
    assert tolerance is not None
    assert not float("nan") <= tolerance
