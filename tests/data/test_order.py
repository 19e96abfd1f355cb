from __future__ import annotations

from collections import Counter

import pytest

from paralign.data.order import Shuffled, Strides


@pytest.mark.parametrize("kind", [Shuffled, Strides])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_every_epoch_has_every_row_once(kind, num_rows):
    order = kind(num_rows, seed=3)
    epochs = [[order.row(e * num_rows + n) for n in range(num_rows)] for e in range(2)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(num_rows))
    if num_rows > 10:
        assert epochs[0] != epochs[1]


def test_the_order_depends_on_seed_and_place_only():
    served = [10**12 + n for n in range(50)]  # far into a source of terabytes, without a list

    def rows(seed: int) -> list[int]:
        order = Shuffled(10**11, seed=seed)
        return [order.row(n) for n in served]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


def test_a_shuffle_has_no_pattern_that_strides_have():
    num_rows = 1 << 12
    steps = {
        kind: Counter(
            (kind(num_rows, seed=0).row(n + 1) - kind(num_rows, seed=0).row(n)) % num_rows
            for n in range(500)
        )
        for kind in (Strides, Shuffled)
    }
    assert len(steps[Strides]) == 1
    assert max(steps[Shuffled].values()) <= 4
    rows = [Shuffled(num_rows, seed=0).row(n) for n in range(num_rows)]
    # Neighbours in time are far apart in place, and halves of an epoch see the whole source.
    assert 0.4 < sum(row < num_rows // 2 for row in rows[: num_rows // 2]) / (num_rows // 2) < 0.6


def test_the_order_never_changes_between_versions():
    # A run that goes on with another version of paralign must see the rows that are left.
    order = Shuffled(1000, seed=7)
    assert [order.row(n) for n in (0, 1, 999, 1000, 123456)] == PINNED


PINNED = [209, 867, 545, 892, 807]
