"""The study of ``python -m tests.equivalence.kills`` in small."""

from __future__ import annotations

import pytest

from tests.equivalence.kills import page, study


@pytest.mark.long
@pytest.mark.ranks
def test_kills_end_in_the_bits_of_a_calm_run(tmp_path):
    kills = list(study(tmp_path, 2, seed=1, steps=6))  # compares each run with the calm one
    assert len(kills) >= 2
    assert all(kill.went_on_from == kill.complete for kill in kills)
    assert f"{len(kills)} of {len(kills)}" in page(kills, 1, 10.0)
