from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paralign.align.measure import Distance, compare_parts
from paralign.layout import Box

finite = st.floats(-1e6, 1e6, allow_subnormal=False)


def box_of(tensor: torch.Tensor) -> Box:
    zeros = (0,) * tensor.dim()
    return Box(zeros, zeros, tuple(tensor.shape))


def distance(x: torch.Tensor, r: torch.Tensor) -> Distance:
    return compare_parts(x, r, box_of(x))


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=40), st.integers(1, 39))
def test_parts_add_up_to_the_whole(pairs: list[tuple[float, float]], cut: int) -> None:
    both = torch.tensor(pairs, dtype=torch.float64)
    x, r = both[:, 0].contiguous(), both[:, 1].contiguous()
    cut = min(cut, len(x) - 1)
    whole, parts = distance(x, r), Distance()
    for start, stop in ((0, cut), (cut, len(x))):
        box = Box((start,), (start,), (stop - start,))
        parts.add(compare_parts(x[start:stop], r[start:stop], box))
    assert parts.elements == whole.elements
    assert parts.beyond == whole.beyond
    assert parts.worst == whole.worst == float((x - r).abs().max())
    assert parts.worst_index is not None
    at = parts.worst_index[0]
    assert abs(float(x[at] - r[at])) == whole.worst
    for name in ("error", "base", "size"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert whole.error == pytest.approx(float((x - r).norm()), rel=1e-12)


def test_worst_element_is_named_by_its_global_index_and_both_values() -> None:
    r = torch.zeros(3, 4, dtype=torch.float64)
    x = r.clone()
    x[2, 1] = -5.0
    found = compare_parts(x, r, Box((0, 0), (10, 20), (3, 4)))
    assert (found.worst_index, found.worst_values) == ((12, 21), (0.0, -5.0))


def test_scale_and_cosine() -> None:
    r = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    double = distance(2 * r, r)
    assert (double.scale, double.relative) == (2.0, 1.0)
    assert double.cosine == pytest.approx(1.0)
    orthogonal = distance(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64), r)
    assert (orthogonal.scale, orthogonal.cosine) == (0.0, 0.0)
    nothing = distance(torch.zeros(3, dtype=torch.float64), r)
    assert (nothing.scale, nothing.cosine, nothing.relative) == (0.0, None, 1.0)


def test_zero_over_zero_and_something_over_zero() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert distance(zero, zero).relative == 0.0
    assert distance(one, zero).relative == math.inf
    assert Distance().relative == 0.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_never_passes(value: float) -> None:
    r = torch.ones(4, dtype=torch.float64)
    x = r.clone()
    x[2] = value
    for pair in ((x, r), (r, x), (x, x * 1.0 if math.isnan(value) else -x)):
        found = distance(*pair)
        assert found.nonfinite == 1
        assert math.isnan(found.relative)
        assert (found.cosine, found.scale) == (None, None)
        assert found.worst_index == (2,)
    total = Distance()
    total.add(distance(x, r))
    total.add(compare_parts(r, 2 * r, box_of(r)))
    assert math.isnan(total.relative)


@pytest.mark.parametrize("size", [1e-200, 1e-320, 1e200])
def test_squares_leave_the_range_and_the_norm_does_not(size: float) -> None:
    r = torch.full((4,), size, dtype=torch.float64)
    assert distance(2 * r, r).relative == pytest.approx(1.0, rel=1e-3)
    assert distance(r, torch.zeros_like(r)).relative == math.inf


def test_share_beyond_is_what_allclose_refuses() -> None:
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(500, generator=generator, dtype=torch.float64)
    x = r + 4e-3 * torch.randn(500, generator=generator, dtype=torch.float64)
    refused = ~torch.isclose(x, r, rtol=2e-3, atol=2e-3)
    assert 0 < distance(x, r).beyond == int(refused.sum()) < 500
