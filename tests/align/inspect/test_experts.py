from __future__ import annotations

import json

import pytest
import torch

from paralign.align.inspect import inspect
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.layout import whole
from tests.align.inspect.runs import feed_trace, only

TOKENS = torch.randint(0, 90, (2, 8), generator=torch.Generator().manual_seed(3))
LAYER = "layers.0.moe.experts"


def routed(tmp_path, counts, *, axis="dp", facts=None):
    """Two ranks of 16 tokens each; per rank how many rows each of its experts returned."""
    feed_trace(tmp_path, {axis: 2}, lambda at: [{"tokens": TOKENS + at[axis]}], facts=facts)
    for rank, rows in enumerate(counts):
        path = tmp_path / f"rank{rank:05d}.json"
        data = json.loads(path.read_text())
        for number, count in rows.items():
            shape = (count, 4)
            entry = TensorEntry(
                Kind.OUTPUT, f"{LAYER}.{number}", 0, "float32", shape, whole(shape), micro_batch=0
            )
            data["tensors"].append(entry.to_json())
        path.write_text(json.dumps(data))
    return inspect(tmp_path)


def test_counts_that_add_up(tmp_path):
    report = routed(tmp_path, [{0: 20, 1: 10}, {2: 34, 3: 0}])
    check = next(check for check in report.checks if check.name == "experts")
    assert (report.findings, check.looked_at) == ([], 1)


def test_rows_that_were_lost(tmp_path):
    finding = only(routed(tmp_path, [{0: 20, 1: 10}, {2: 33}], facts={"top_k": 2}))
    assert (finding.component, finding.cause) == ("forward", "missing_contribution")
    assert "63 rows at step 0, but 32 tokens with top_k=2 are 64" in finding.fix
    assert finding.evidence["counts"] == {"0": 20, "1": 10, "2": 33}


@pytest.mark.parametrize(("rows", "cause"), [(128, "constant_factor"), (70, "unknown")])
def test_rows_that_were_sent_twice(tmp_path, rows, cause):
    finding = only(routed(tmp_path, [{0: rows}, {}], facts={"top_k": 2}))
    assert finding.cause == cause
    assert finding.axes == (["dp"] if cause == "constant_factor" else [])


def test_ranks_of_tp_may_share_the_rows(tmp_path):
    report = routed(tmp_path, [{0: 5}, {1: 5}], axis="tp")
    check = next(check for check in report.checks if check.name == "experts")
    assert (check.looked_at, check.findings) == (0, [])
    assert "ranks of tp" in str(check.why_not)
