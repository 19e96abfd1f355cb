"""A number of a tensor's bits: equal tensors have equal numbers, and others practically never.

Bits are mixed with their place before they are added up, so that swapped elements, or differences
that cancel, show. Integers wrap around, so that neither order nor device enters.

Ref:
    The finaliser of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 62  # of the number: not negative, and neither is it when it is negated out of range
# Elements that are mixed at once: what a core's cache holds, and what keeps an accelerator busy.
_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 22
_KINDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number from 0 to ``2^62 - 1`` for the bits of a plain tensor, int64 on its device.

    Shapes:
        tensor: any; 0 and -0 differ, and so do NaNs with other bits.

    Comm:
        none.
    """
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_KINDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = _CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
    for first in range(0, bits.numel(), size):
        piece = bits[first : first + size]
        places = torch.arange(first + 1, first + 1 + piece.numel(), device=tensor.device)
        total += _mixed(places.mul_(_GAMMA).add_(piece)).sum()
    return total & ((1 << BITS) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)).mul_(_MIX_1)
    x = (x ^ _shifted(x, 27)).mul_(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift to the right without the sign, or a number and its complement were mixed alike."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
