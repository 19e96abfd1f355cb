from __future__ import annotations

import pytest

from bench import compare_large
from paralign.align.trace_reader import TraceReader


def test_both_sides_see_all_of_both_traces(tmp_path):
    assert compare_large.write_traces(tmp_path, 5000, width=64) == 2 * 64 * 64
    assert len(compare_large.payloads(tmp_path)) == 2 + 2 * 2
    assert compare_large.read_once(tmp_path) > 0
    assert compare_large.compare_once(tmp_path) > 0
    compare_large.drop_from_cache(tmp_path)
    seconds, peak = compare_large.run_alone("read", tmp_path)
    assert seconds > 0
    assert peak > 1e6


def test_traces_that_are_not_aligned_are_not_measured(tmp_path):
    compare_large.write_traces(tmp_path, 5000, width=64)
    with TraceReader(tmp_path / "par") as trace:
        entry = trace.ranks[1].tensors[0]
    path = tmp_path / "par" / str(entry.file)
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # the exponent of the last element
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match="the traces are misaligned"):
        compare_large.compare_once(tmp_path)
    with pytest.raises(RuntimeError, match=r"compare ended with 1:[\s\S]*misaligned"):
        compare_large.run_alone("compare", tmp_path)
