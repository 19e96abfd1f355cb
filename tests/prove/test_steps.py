from __future__ import annotations

from pathlib import Path

import pytest

from paralign.align.tensor_entry import Kind
from paralign.align.trace_reader import TraceReader
from paralign.prove.run import align
from tests.parity import make_config


@pytest.mark.ranks
def test_activations_are_recorded_in_the_dtype_that_computes(tmp_path: Path) -> None:
    config = make_config(
        mesh={"dp_shard": 2},
        pipeline={"num_microbatches": 2},
        align={"dtype": "bfloat16", "record": "activations"},
    )
    report = align(config, trace=tmp_path, timeout=300)
    assert report.verdict == "aligned", report.why
    rows = {
        kind: [row for row in report.tensors if row.kind == kind] for kind in vars(Kind).values()
    }
    assert [row.name for row in rows[Kind.INPUT]] == ["tokens", "labels", "positions"]
    assert len(rows[Kind.OUTPUT]) == len(rows[Kind.OUTPUT_GRAD]) > 20
    assert max(row.eps for row in rows[Kind.OUTPUT]) > 0  # measured against the float64 truth
    with TraceReader(tmp_path / "reference") as trace:
        dtypes = {e.dtype for e in trace.ranks[0].tensors if e.kind == Kind.OUTPUT}
    assert dtypes == {"bfloat16"}
