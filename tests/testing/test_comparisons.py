from __future__ import annotations

import json

from paralign.testing.comparisons import Comparison, FolderLog, TestLog, listening, tell

BAD = Comparison({"dp": 2}, "misaligned", [{"component": "loss", "cause": "unknown", "axes": []}])
GOOD = Comparison({"dp": 2}, "aligned")


def traces(tmp_path):
    for role in ("reference", "parallel"):
        (tmp_path / role).mkdir(exist_ok=True)
        (tmp_path / role / "facts.json").write_text(role)
    return {role: tmp_path / role for role in ("reference", "parallel")}


def test_nobody_need_listen(tmp_path):
    assert tell(BAD, traces(tmp_path), "{}") is None


def test_only_failing_traces_are_kept(tmp_path):
    log = TestLog(tmp_path / "keep")
    with listening(log):
        assert tell(GOOD, traces(tmp_path), "{}") is None
        first = tell(BAD, traces(tmp_path), '{"verdict": "misaligned"}')
        second = tell(BAD, traces(tmp_path), "{}")
    assert log.comparisons == [GOOD, BAD, BAD]
    assert (first, second) == (tmp_path / "keep/0", tmp_path / "keep/1")
    assert (tmp_path / "keep/0/parallel/facts.json").read_text() == "parallel"
    assert json.loads((tmp_path / "keep/0/report.json").read_text()) == {"verdict": "misaligned"}
    assert tell(BAD, traces(tmp_path), "{}") is None  # the test is over


def test_a_rank_writes_what_its_caller_reads(tmp_path):
    (tmp_path / "told").mkdir()
    log = FolderLog(tmp_path / "told", None)
    with listening(log):
        tell(BAD, traces(tmp_path), "{}")
        tell(GOOD, traces(tmp_path), "{}")
    assert log.read() == [BAD, GOOD]
