"""The experiment shows three mismatches and one bitwise match, and with guards three refusals."""

from __future__ import annotations

import pytest

from examples import context_parallel_matrix

pytestmark = pytest.mark.ranks


def test_prints_both_tables(capsys: pytest.CaptureFixture[str]):
    context_parallel_matrix.main()
    text = capsys.readouterr().out
    off, on = text.split("guards on:")
    assert off.startswith("cp=2, BNSD = [1, 32, 32, 64], causal, fp32")
    rows = [line.split() for line in off.splitlines() if line.startswith("  head_dim")]
    assert [row[0] for row in rows] == ["head_dim=3", "head_dim=3", "head_dim=1", "head_dim=1"]
    assert [row[-1] for row in rows] == ["MISMATCH", "MISMATCH", "MISMATCH", "MATCH"]
    assert all(0.5 < float(row[-2]) < 10 for row in rows[:3])
    assert float(rows[3][-2]) == 0.0

    rows = [line.split() for line in on.splitlines() if line.startswith("  head_dim")]
    assert [row[-1] for row in rows] == ["REFUSED", "REFUSED", "REFUSED", "MATCH"]
    assert float(rows[3][-2]) == 0.0
    messages = " ".join(on.split())
    assert messages.count("It must be the dim that counts heads: use head_dim=1.") == 2
    assert messages.count("Feed each rank its slice: x.narrow(seq_dim, rank * 16, 16)") == 1
