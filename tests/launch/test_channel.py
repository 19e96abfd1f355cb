from __future__ import annotations

import pickle

import pytest

from paralign.launch import report_event, run_ranks
from paralign.launch.channel import inside_rank
from tests.launch import rank_functions as on_rank


@pytest.mark.ranks
def test_events_arrive_in_order_with_their_rank_and_before_the_result():
    events: list[tuple[int, object]] = []
    results = run_ranks(
        on_rank.report_progress, 2, 3, 0.0, on_event=lambda *event: events.append(event)
    )
    assert results == [3, 3]
    for rank in range(2):
        assert [p for r, p in events if r == rank] == [{"step": step} for step in range(3)]


@pytest.mark.ranks
def test_an_error_of_the_listener_ends_the_world():
    def refuse(rank: int, payload: object) -> None:
        raise LookupError("the listener has had enough")

    with pytest.raises(LookupError, match="had enough"):
        run_ranks(on_rank.report_progress, 2, 1000, 0.01, on_event=refuse)


@pytest.mark.ranks
def test_an_event_that_cannot_be_pickled_is_the_ranks_error():
    with pytest.raises(
        RuntimeError, match=r"(?s)^\[rank 0\] .*pickle.*\(the same on all 2 ranks\)"
    ):
        run_ranks(on_rank.report_unpicklable, 2)


@pytest.mark.ranks
def test_an_event_that_cannot_be_unpickled_names_the_rank():
    with pytest.raises(
        RuntimeError, match=r"^\[rank 0\] reported an event that cannot be unpickle"
    ):
        run_ranks(on_rank.report_explosive, 1)


def test_outside_ranks_nobody_listens():
    assert not inside_rank()
    report_event(lambda: "not even pickled")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(lambda: 0)
