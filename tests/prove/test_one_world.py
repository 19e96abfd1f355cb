from __future__ import annotations

import pytest
import torch.distributed as dist

from paralign.errors import RankError
from paralign.launch import report_event
from paralign.prove.one_world import RunDone, run_many

pytestmark = pytest.mark.ranks


def runs(names, bad):
    for name in names:
        if name == bad:
            raise ValueError("this run is broken")
        dist.barrier()
        if dist.get_rank() == 0:
            report_event(RunDone(name, 0.5))


def collect(bad, *, enough=10):
    done: list[str] = []
    failed: dict[str, Exception] = {}

    def finished(run):
        done.append(run.name)
        return len(done) < enough

    run_many(
        runs,
        ["a", "b", "c", "d"],
        2,
        bad,
        device="cpu",
        timeout=30,
        describe="rank {}".format,
        on_done=finished,
        on_failed=failed.__setitem__,
    )
    return done, failed


def test_a_run_that_ends_its_world_leaves_the_others_their_turn():
    done, failed = collect("b")
    assert done == ["a", "c", "d"]
    assert list(failed) == ["b"]
    assert isinstance(failed["b"], RankError)
    assert "this run is broken" in str(failed["b"])


def test_the_rest_is_not_run_once_enough_is_done():
    assert collect(None, enough=2) == (["a", "b"], {})
