from __future__ import annotations

import itertools

from bench._rounds import median_ratio, median_seconds, turns


def test_each_side_comes_first_equally_often_and_meets_other_neighbours():
    sides = "abcde"  # of three, a rotation alone would make all neighbours
    orders = [turns(sides, number) for number in range(50)]
    assert all(sorted(order) == list(sides) for order in orders)
    for cycle in range(0, 50, 5):
        assert sorted(order[0] for order in orders[cycle : cycle + 5]) == list(sides)
    in_turn = "".join(itertools.chain(*orders))
    neighbours = {pair for pair in itertools.pairwise(in_turn) if len(set(pair)) == 2}
    assert neighbours == set(itertools.permutations(sides, 2))
    assert orders == [turns(sides, number) for number in range(50)]


def test_the_ratio_is_of_neighbours_in_time():
    # The machine became slow after the first round, on both sides alike.
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 10.0}, {"a": 6.0, "b": 10.0}]
    assert median_ratio(rounds, "a", "b") == 0.5
    assert median_seconds(rounds, "a") == 5.0
