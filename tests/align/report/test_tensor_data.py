from __future__ import annotations

import json
import math
from typing import Any

from paralign.align.report.tensor_data import tensor_data
from tests.align.report.reports import profile, row


def decode(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(data["fields"], values, strict=True)) for values in data["rows"]]


def test_words_are_written_once():
    data = tensor_data([row("grad", "w"), row("grad", "w", 1), row("update", "w")])
    assert data["words"] == ["grad", "w", "ordinary", "placement", "update"]
    first = decode(data)[0]
    assert data["words"][first["name"]] == "w"
    assert first["state"] is None


def test_numbers_keep_what_is_read_of_them():
    made = row("grad", "w", eps=1.23456789, worst_values=(0.1, 0.12345678901234))
    [found] = decode(tensor_data([made]))
    assert found["eps"] == 1.235
    assert found["values"] == [0.1, 0.123456789012]
    assert found["budget"] == 100
    assert found["index"] == [3, 5]
    assert found["ok"] == 1


def test_values_that_json_lacks_become_their_names():
    data = tensor_data([row("grad", "w", eps=math.nan), row("grad", "v", eps=math.inf)])
    assert [found["eps"] for found in decode(data)] == ["nan", "inf"]
    json.dumps(data, allow_nan=False)


def test_a_profile_says_where_in_words_and_in_numbers():
    made = row("grad", "w", eps=1e9, profile=profile(range(16, 32)))
    [found] = decode(tensor_data([made]))
    assert found["profile"]["places"][0] == "rows 128-255 of 256 hold 99% of the error"
    name, size, starts, errors, shares = found["profile"]["dims"][0]
    assert (name, size, starts[:3]) == ("rows", 256, [0, 8, 16])
    assert errors[0] == 1e-15
    assert errors[31] == 1
    assert shares == [0] * 16 + [6] * 16
    assert [rank[2] for rank in found["profile"]["ranks"]] == [0, 0, 50, 50]


def test_a_bin_of_nan_has_all_the_error():
    broken = profile(range(1))
    broken["dims"][0]["error"][5] = math.nan
    [found] = decode(tensor_data([row("grad", "w", eps=math.nan, profile=broken)]))
    _, _, _, errors, shares = found["profile"]["dims"][0]
    assert errors[5] == "nan"
    assert shares[5] == 100
