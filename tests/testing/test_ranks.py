from __future__ import annotations

import pytest

from paralign.errors import RankTimeout
from paralign.mesh import Degrees
from paralign.testing import ranks, run_on_ranks
from tests.launch import rank_functions as on_rank

pytestmark = pytest.mark.ranks


def test_results_come_by_rank():
    assert [result[:3] for result in run_on_ranks(on_rank.rank_and_sum, 2, 1.0)] == [
        (0, 2, 3.0),
        (1, 2, 3.0),
    ]


def test_what_nearly_every_test_needs_is_imported_once_and_not_by_each_rank(monkeypatch):
    asked = []
    monkeypatch.setattr(ranks, "start_fork_server", lambda *modules: asked.append(modules))
    monkeypatch.setattr(ranks, "run_ranks", lambda *args, **kwargs: asked.append("ranks"))
    run_on_ranks(on_rank.plain_rank, 2)
    assert asked == [("paralign.parallelize",), "ranks"]


def test_a_failing_rank_fails_the_test_with_its_coordinates():
    with pytest.raises(RuntimeError, match=r"^\[rank 1: tp=1\] ValueError: the model is on fire$"):
        run_on_ranks(on_rank.act_on, 2, 1, "raise", describe=Degrees(tp=2).describe_rank)


def test_a_hanging_rank_fails_the_test():
    with pytest.raises(RankTimeout, match=r"within timeout=1 s"):
        run_on_ranks(on_rank.act_on, 2, 1, "hang", timeout=1)
