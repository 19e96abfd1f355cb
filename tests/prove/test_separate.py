from __future__ import annotations

import pytest

from paralign.align.verdict import Finding, Report
from paralign.config.rules import find_problems
from paralign.errors import RankError
from paralign.prove.separate import describe_change, separate, separating_config
from tests.parity import make_config


def finding(cause="constant_factor", axes=(), *candidates, separate_by="run again") -> Finding:
    return Finding(
        component="reduction",
        cause=cause,
        fix="Mend it.",
        axes=list(axes),
        candidates=list(candidates),
        separate_by=separate_by,
    )


BOTH = ("reduction/constant_factor over dp_shard: a", "reduction/constant_factor over cp: b")


def report(*findings) -> Report:
    return Report(
        verdict="misaligned", why="", dtype="float64", yardstick="", findings=list(findings)
    )


@pytest.fixture
def config():
    return make_config(mesh={"dp_shard": 2, "cp": 2}, pipeline={"num_microbatches": 2})


def test_the_candidates_get_sizes_that_nothing_else_has(config):
    changed = separating_config(config, finding("constant_factor", (), *BOTH))
    assert changed is not None
    mesh = changed.mesh
    assert mesh.dp_shard != mesh.cp
    assert {mesh.dp_shard, mesh.cp}.isdisjoint({1, changed.pipeline.num_microbatches})
    assert find_problems(changed) == []
    assert mesh.degrees.world_size <= 16


def test_micro_batches_can_be_a_candidate_too(config):
    listed = ("reduction/constant_factor over cp", "backward/constant_factor: every rank")
    found = finding("constant_factor", (), *listed, separate_by="another num_microbatches or cp")
    changed = separating_config(config, found)
    assert changed is not None
    sizes = {changed.mesh.cp, changed.pipeline.num_microbatches, changed.mesh.dp_shard}
    assert len(sizes) == 3


@pytest.mark.parametrize(
    "found",
    [
        finding("constant_factor", ("cp",)),
        finding("constant_factor", ("cp",), BOTH[1]),
        finding("constant_factor", (), *BOTH, separate_by=None),
        finding(
            "double_reduction",
            ("cp",),
            "reduction/double_reduction over cp",
            "reduction/constant_factor over cp",
        ),
    ],
)
def test_nothing_is_run_where_sizes_decide_nothing(config, found):
    def never(changed):
        raise AssertionError("no run is due")

    before = report(found)
    assert separate(config, before, never) == (before, None)


def test_the_second_run_decides(config):
    seen = []

    def again(changed):
        seen.append(changed)
        return report(finding("constant_factor", ("cp",)))

    judged, told = separate(config, report(finding("constant_factor", (), *BOTH)), again)
    (first,) = judged.findings
    assert (first.axes, first.candidates, first.separate_by) == (["cp"], [], "run again")
    assert told is not None
    assert told.startswith(describe_change(config, seen[0]))
    assert first.evidence["separated_by"] in first.fix


@pytest.mark.parametrize(
    "second",
    [
        report(),
        report(finding("unknown", ())),
        report(finding("constant_factor", (), *BOTH)),
        RankError("rank 0: fell over"),
    ],
)
def test_a_second_run_that_says_something_else_decides_nothing(config, second):
    def again(changed):
        if isinstance(second, Exception):
            raise second
        return second

    judged, told = separate(config, report(finding("constant_factor", (), *BOTH)), again)
    assert judged.findings[0].candidates == list(BOTH)
    assert judged.findings[0].axes == []
    assert told is not None
    assert "did not" in told


STAYS = ("reduction/double_reduction over cp: a", "backward/constant_factor: after its reduction")


def factor_two(*candidates) -> Finding:
    found = finding("double_reduction", ("cp",), *candidates)
    found.evidence["factor"] = "2"
    return found


def test_a_factor_of_no_axis_stays_when_sizes_change():
    config = make_config(
        mesh={"dp_shard": 3, "cp": 2},
        pipeline={"num_microbatches": 5},
        batch={"global_batch": 15, "seq_len": 16},
    )
    changed = separating_config(config, factor_two(*STAYS))
    assert changed is not None
    assert 2 not in (changed.mesh.dp_shard, changed.mesh.cp)

    def stays(changed):
        second = finding("constant_factor", (), separate_by=None)
        second.component = "backward"
        return report(second)

    judged, _ = separate(config, report(factor_two(*STAYS)), stays)
    (first,) = judged.findings
    assert (first.component, first.cause, first.axes) == ("backward", "constant_factor", [])


def test_an_axis_that_has_the_size_of_a_factor_that_stays_decides_nothing():
    config = make_config(  # whatever cp becomes, 2 is still what dp_shard is
        mesh={"dp_shard": 2, "cp": 2},
        pipeline={"num_microbatches": 5},
        batch={"global_batch": 10, "seq_len": 16},
    )
    assert separating_config(config, factor_two(*STAYS)) is None


def test_a_factor_that_goes_with_its_axis_was_the_axiss():
    config = make_config(  # with two heads nothing but cp=1 is legal besides cp=2
        mesh={"cp": 2},
        model={"num_heads": 2, "num_kv_heads": 2},
        pipeline={"num_microbatches": 5},
        batch={"global_batch": 5, "seq_len": 16},
    )
    changed = separating_config(config, factor_two(*STAYS))
    assert changed is not None
    assert changed.mesh.cp == 1

    def gone(changed):
        return Report(verdict="aligned", why="", dtype="float64", yardstick="", findings=[])

    judged, told = separate(config, report(factor_two(*STAYS)), gone)
    (first,) = judged.findings
    assert (first.cause, first.axes) == ("double_reduction", ["cp"])
    assert told is not None
    assert "double_reduction over cp" in told


def test_no_product_of_axes_has_the_size_of_a_candidate():
    """A sixth is pp x dp_shard or dp_shard x cp; dp_shard alone must not be what pp is."""
    config = make_config(
        mesh={"pp": 2, "dp_shard": 3, "cp": 2},
        model={"num_layers": 4},
        pipeline={"num_microbatches": 5},
        batch={"global_batch": 15, "seq_len": 16},
    )
    listed = (
        "reduction/constant_factor over pp x dp_shard",
        "reduction/constant_factor over dp_shard x cp",
    )
    found = finding("constant_factor", (), *listed)
    changed = separating_config(config, found)
    assert changed is not None
    mesh = changed.mesh
    assert mesh.pp != mesh.dp_shard
    live = [axis for axis in ("dp_shard", "cp") if getattr(mesh, axis) > 1]

    def again(changed):
        return report(finding("constant_factor", live, separate_by=None))

    judged, _ = separate(config, report(found), again)
    assert judged.findings[0].axes == ["dp_shard", "cp"]  # also where one of them has one rank
