from __future__ import annotations

import pytest
import torch

from paralign import checksum as module
from paralign.checksum import BITS, checksum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(*shape, generator=generator) * 200).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_change_shows(dtype):
    tensor = noise(7, 5, dtype=dtype)
    before = checksum(tensor)
    assert torch.equal(tensor, noise(7, 5, dtype=dtype))  # it is not computed in place
    assert before.dtype == torch.int64 and 0 <= int(before) < 1 << BITS
    assert checksum(tensor.clone()) == before
    for place in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[place] += 1
        assert checksum(other) != before


def test_the_last_bit_and_the_sign_of_zero_show():
    tensor = torch.zeros(4)
    other = tensor.clone()
    other[2] = -0.0
    assert torch.equal(tensor, other)
    assert checksum(tensor) != checksum(other)
    assert checksum(torch.ones(4)) != checksum(torch.ones(4).nextafter(torch.tensor(2.0)))


def test_order_shows_and_layout_does_not():
    tensor = noise(6, 4)
    assert checksum(tensor.t()) != checksum(tensor)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor[::2]) == checksum(tensor[::2].clone())


def test_differences_that_cancel_show():
    bits = torch.arange(100, 164)
    for pattern in ([1, -1], [1, -1, -1, 1], [1, -2, 1], [1, -3, 3, -1]):
        for first in range(60):
            other = bits.clone()
            other[first : first + len(pattern)] += torch.tensor(pattern)
            assert checksum(other) != checksum(bits), (pattern, first)
    assert checksum(~bits) != checksum(bits)


def test_large_tensors_are_taken_in_pieces(monkeypatch):
    tensor = noise(1000)
    whole = checksum(tensor)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert checksum(tensor) == whole
    assert checksum(torch.empty(0)) == 0
