from __future__ import annotations

import pytest

from bench.record import SIDES, Cost, measure, problems
from tests.parity import make_config


def test_every_side_trains_alike_and_records_what_it_says() -> None:
    cost = measure(make_config(), rounds=1)
    assert cost.same_weights
    assert cost.rounds[0].keys() == SIDES.keys()
    assert cost.num_bytes["plain"] == 0
    assert 0 < 2 * cost.num_bytes["gradients"] < cost.num_bytes["everything"]


@pytest.mark.parametrize(
    ("times", "same", "wanted"),
    [
        ({"plain": 1.0, "gradients": 1.05, "everything": 1.5}, True, []),
        ({"plain": 1.0, "gradients": 1.2, "everything": 1.5}, True, ["recording gradients takes"]),
        ({"plain": 1.0, "gradients": 1.0, "everything": float("nan")}, True, ["everything takes"]),
        ({"plain": 0.1, "gradients": 0.1, "everything": 0.1}, True, ["a step takes 0.10 s"]),
        ({"plain": 1.0, "gradients": 1.0, "everything": 1.0}, False, ["other weights"]),
    ],
)
def test_targets(times: dict[str, float], same: bool, wanted: list[str]) -> None:
    found = problems(Cost(rounds=[times], cpu=[times], num_bytes={}, same_weights=same))
    assert len(found) == len(wanted)
    assert all(text in line for text, line in zip(wanted, found, strict=True))
