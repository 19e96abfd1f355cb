"""In which order rows are served: a function of the seed and the epoch, the same on every mesh."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol


class Order(Protocol):
    """Says which row is served when."""

    def row(self, served: int) -> int:
        """Return the number of the row that is served as the ``served``-th, counted from 0."""
        ...


class Strides:
    """Every row once an epoch, in strides over the whole source.

    The n-th row of an epoch is number ``(offset + stride * n) % num_rows``, where the seed and the
    epoch choose ``offset`` and ``stride`` (which has no common divisor with ``num_rows``).
    """

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed

    def row(self, served: int) -> int:
        """Return the number of a row; see :class:`Order`."""
        epoch, place = divmod(served, self._num_rows)
        offset = draw(self._num_rows, self._seed, "offset", epoch)
        stride = 1 + draw(self._num_rows, self._seed, "stride", epoch)
        while math.gcd(stride, self._num_rows) != 1:  # 1 and num_rows + 1 always end the search
            stride += 1
        return (offset + stride * place) % self._num_rows


class Shuffled:
    """Every row once an epoch, in an order that looks random, without a list of all rows.

    A Feistel network permutes the numbers below a power of four, keyed by the seed and the epoch.
    What falls beyond ``num_rows`` is sent through again until it does not, so that the numbers
    below are permuted among themselves.

    Ref:
        Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
        1988 (four rounds); Black and Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle
        walking).
    """

    _NUM_ROUNDS = 4

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        # Two halves of so many bits hold every number: at most four times as many as there are.
        self._half = max(1, -(-(num_rows - 1).bit_length() // 2))

    def row(self, served: int) -> int:
        """Return the number of a row; see :class:`Order`."""
        epoch, number = divmod(served, self._num_rows)
        while True:
            number = self._permuted(number, epoch)
            if number < self._num_rows:
                return number

    def _permuted(self, number: int, epoch: int) -> int:
        below = 1 << self._half
        left, right = divmod(number, below)
        for turn in range(self._NUM_ROUNDS):
            left, right = right, left ^ draw(below, self._seed, "shuffle", epoch, turn, right)
        return left * below + right


def draw(below: int, *key: int | str) -> int:
    """Return a number in ``range(below)`` that depends only on ``key``, on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") % below
