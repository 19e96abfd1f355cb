from __future__ import annotations

from paralign.config.nearest import nearest, suggest


def test_case_does_not_matter_and_the_known_spelling_comes_back():
    assert nearest("GPIPE", ["1F1B", "GPipe"]) == "GPipe"


def test_nothing_is_suggested_where_nothing_is_close():
    assert nearest("zzz", ["pp", "cp"]) is None
    assert suggest("zzz", ["pp", "cp"]) == "Use one of pp, cp."
