"""Initial values that depend on (seed, parameter name, element index) and on nothing else.

Ranks, shards, pipeline stages and construction order do not enter, so every mesh starts from the
same weights, bit for bit::

    whole tensor   v0 v1 v2 v3 | v4 v5 v6 v7        v_i = f(seed, name, i)
    shard 0        v0 v1 v2 v3
    shard 1                      v4 v5 v6 v7        fill_(shard, ..., offsets=(4,))

See [Note: stable bits] for why only some functions may be used here.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paralign.errors import ConfigError, LayoutError
from paralign.vector_math import settle_vector_math

# [Note: stable bits]
# The last bits of exp, sigmoid and silu on a CPU depend on where in memory an element lies (vector
# lane or scalar tail), so the same element of two differently cut shards may differ. log, cos and
# sqrt in float64 do not, once they are settled, and integer arithmetic is exact. Values are
# computed on the CPU whatever the device of the parameter: some accelerators lack float64, and a
# CPU reference must start from the same bits.

# Elements computed at once: small enough for a core's cache, large enough to hide the cost of a
# call.
_CHUNK = 1 << 16

# Constants of splitmix64, as signed 64-bit numbers; int64 products wrap around as they should.
# Multiples of the first are far apart in all bits.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Init:
    """How a parameter starts. Build it with :meth:`normal` or :meth:`constant`."""

    kind: Literal["normal", "constant"]
    mean: float
    std: float

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in ("normal", "constant"):
            problems.append(f"kind={self.kind!r} must be 'normal' or 'constant'")
        if not math.isfinite(self.mean):
            problems.append(f"mean={self.mean!r} must be finite")
        if not (math.isfinite(self.std) and self.std >= 0):
            problems.append(f"std={self.std!r} must be finite and at least 0")
        if problems:
            raise ConfigError.from_problems("cannot describe an initial value", problems)

    @classmethod
    def normal(cls, mean: float = 0.0, *, std: float) -> Init:
        """Draw every element from a normal distribution."""
        return cls("normal", float(mean), float(std))

    @classmethod
    def constant(cls, value: float) -> Init:
        """Set every element to ``value``."""
        return cls("constant", float(value), 0.0)


@torch.no_grad()
def fill_(
    local: Tensor,
    init: Init,
    *,
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    offsets: tuple[int, ...],
) -> Tensor:
    """Fill one box of a parameter, in place, with its initial values.

    Shapes:
        local: the box ``[offsets[d], offsets[d] + local.shape[d])`` of ``global_shape`` in every
            dim d; any strides, and no elements at all are fine.

    Comm:
        none. Bitwise equal to the same box of the whole tensor, for every way to cut it.

    Args:
        local: The tensor to fill: this rank's plain piece, not a DTensor.
        init: The distribution.
        seed: Any integer.
        name: The global name of the parameter.
        global_shape: Shape of the whole parameter.
        offsets: Where the box starts, per dim.

    Returns:
        ``local``.

    Raises:
        LayoutError: The box does not lie inside ``global_shape``.
        ConfigError: ``local`` is on the meta device or does not hold floating-point numbers.

    Ref:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; Box and
        Muller, "A note on the generation of random normal deviates", 1958.
    """
    _check_box(local, name, tuple(global_shape), tuple(offsets))
    if init.kind == "constant":
        return local.fill_(init.mean)
    settle_vector_math()
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    keys = stream_keys(seed, name)
    _fill_normal(local, init, keys, [(o, s) for o, s in zip(offsets, strides, strict=True)])
    return local


def _check_box(
    local: Tensor, name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    shape = tuple(local.shape)
    if not len(shape) == len(global_shape) == len(offsets):
        raise LayoutError(
            f"parameter {name!r}: the local shape {shape}, global_shape={global_shape} and "
            f"offsets={offsets} must have the same number of dims."
        )
    if problems := [
        f"dim {dim}: offset {start} + local size {size} must lie between 0 and the global size "
        f"{whole}"
        for dim, (start, size, whole) in enumerate(zip(offsets, shape, global_shape, strict=True))
        if start < 0 or start + size > whole
    ]:
        raise LayoutError.from_problems(
            f"parameter {name!r}: the box of shape {shape} at {offsets} is outside {global_shape}",
            problems,
        )
    if local.is_meta:
        raise ConfigError(
            f"parameter {name!r} is on the meta device and has no memory to fill. Call "
            "to_empty(device=...) on its module first."
        )
    if not local.is_floating_point():
        raise ConfigError(
            f"parameter {name!r} has dtype {local.dtype}; only floating-point parameters can be "
            "initialised."
        )


def stream_keys(seed: int, name: str) -> tuple[int, int]:
    """Return two signed 64-bit keys. A real hash, since Python's ``hash`` changes per process."""
    digest = hashlib.blake2b(f"{int(seed)}:{name}".encode(), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


def _fill_normal(
    local: Tensor, init: Init, keys: tuple[int, int], box: list[tuple[int, int]], dim: int = 0
) -> None:
    """Fill ``local``, whose dim d starts at ``box[d][0]`` and steps by ``box[d][1]`` elements."""
    if local.numel() > _CHUNK:
        # Cut the first dim that can be cut, in pieces of about a chunk. A piece of one row may
        # still be too large; the next call then cuts its next dim.
        rows = max(1, _CHUNK // max(1, local.numel() // local.shape[dim]))
        start, stride = box[dim]
        next_dim = dim + 1 if rows == 1 else dim
        for first in range(0, local.shape[dim], rows):
            piece = local.narrow(dim, first, min(rows, local.shape[dim] - first))
            at = [*box[:dim], (start + first, stride), *box[dim + 1 :]]
            _fill_normal(piece, init, keys, at, next_dim)
        return
    index = torch.zeros((), dtype=torch.int64)
    for size, (start, stride) in zip(local.shape, box, strict=True):
        steps = torch.arange(start, start + size, dtype=torch.int64).mul_(stride)
        index = index.unsqueeze(-1) + steps
    values = _normals(index, keys).mul_(init.std).add_(init.mean)
    local.copy_(values)


def _normals(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return one standard normal per element index (int64), in float64."""
    counter = index.mul_(GAMMA)
    radius = _uniform(counter + keys[0]).log_().mul_(-2.0).sqrt_()
    angle = _uniform(counter.add_(keys[1])).mul_(2.0 * math.pi).cos_()
    return radius.mul_(angle)


def _uniform(state: Tensor) -> Tensor:
    """Mix ``state`` (int64, overwritten) and return numbers of (0, 1] in float64."""
    mix_(state)
    # The upper 53 bits, as centres of 2**53 cells: never 0, so that the logarithm is finite.
    bits = state.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def mix_(state: Tensor) -> Tensor:
    """Mix the bits of every element of ``state`` (int64, overwritten), and return it.

    Each bit of the result depends on all bits of the element; different elements stay different.
    """
    _xor_shift(state, 30).mul_(_MIX_1)
    _xor_shift(state, 27).mul_(_MIX_2)
    return _xor_shift(state, 31)


def _xor_shift(state: Tensor, shift: int) -> Tensor:
    # int64 shifts repeat the sign; the mask makes the shift a logical one.
    shifted = state.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
    return state.bitwise_xor_(shifted)
