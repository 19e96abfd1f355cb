from __future__ import annotations

from bench._rounds import median_ratio, median_seconds, turns


def test_each_side_comes_first_equally_often():
    assert [turns("abc", number) for number in range(3)] == [list("abc"), list("bca"), list("cab")]


def test_the_ratio_is_of_neighbours_in_time():
    # The machine became slow after the first round, on both sides alike.
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 10.0}, {"a": 6.0, "b": 10.0}]
    assert median_ratio(rounds, "a", "b") == 0.5
    assert median_seconds(rounds, "a") == 5.0
