"""Rotary positions: scores depend on distances only, slices are turned as in the whole."""

from __future__ import annotations

import math

import torch

from paralign.models.rotary import apply_rotary, default_positions, rotary_tables

WIDTH, THETA = 8, 10_000.0


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return apply_rotary(x, rotary_tables(positions, head_dim=WIDTH, theta=THETA))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_pairs_are_turned_as_complex_numbers():
    x, positions = draw(2, 3, 5, WIDTH), torch.tensor([[0, 1, 2, 3, 4], [7, 70, 700, 7000, 70000]])
    frequencies = [THETA ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)]
    angles = positions[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    numbers = torch.complex(x[..., : WIDTH // 2], x[..., WIDTH // 2 :])
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(turn(x, positions), expected, rtol=1e-10, atol=1e-10)


def test_scores_depend_on_the_distance_of_positions_only():
    q, k = draw(1, 1, 1, WIDTH), draw(1, 1, 2, WIDTH)[:, :, 1:]

    def score(query_at: int, key_at: int) -> float:
        turned_q, turned_k = turn(q, torch.tensor([[query_at]])), turn(k, torch.tensor([[key_at]]))
        return float((turned_q * turned_k).sum())

    near = score(5, 3)
    assert math.isclose(near, score(1005, 1003), rel_tol=1e-11)
    assert math.isclose(near, score(2, 0), rel_tol=1e-12)
    assert abs(near - score(5, 2)) > 1e-3


def test_length_is_kept_and_position_zero_is_not_turned():
    x = draw(2, 3, 5, WIDTH)
    turned = turn(x, torch.arange(5).expand(2, 5))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


def test_slices_by_position_are_bitwise_slices():
    x, positions = draw(2, 3, 64, WIDTH), torch.arange(64).expand(2, 64)
    whole = turn(x, positions)
    for kept in (range(16, 32), [*range(0, 8), *range(56, 64)], [63, 5, 17]):
        index = torch.tensor(list(kept))
        assert torch.equal(turn(x[:, :, index], positions[:, index]), whole[:, :, index])


def test_far_positions_are_exact_before_they_are_rounded():
    position = 1_000_003
    tables = rotary_tables(torch.tensor([[position]]), head_dim=2, theta=THETA)
    assert tables.cos.dtype == torch.float64
    assert tables.cos.shape == (1, 1, 1, 1)
    assert math.isclose(tables.cos.item(), math.cos(position), rel_tol=1e-14)
    assert math.isclose(tables.sin.item(), math.sin(position), rel_tol=1e-14)


def test_turned_values_keep_the_dtype_of_what_is_turned():
    positions = torch.arange(5).expand(2, 5)
    for dtype in (torch.float32, torch.bfloat16):
        assert turn(draw(2, 3, 5, WIDTH).to(dtype), positions).dtype == dtype


def test_default_positions_count_every_row_from_zero():
    assert default_positions(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [[0, 1, 2]] * 2
