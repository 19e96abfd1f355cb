from __future__ import annotations

import pytest

from paralign.commands.options import parse_count, parse_seconds
from paralign.errors import ConfigError


@pytest.mark.parametrize(("text", "seconds"), [("300", 300.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_seconds(text, seconds):
    assert parse_seconds("--timeout", text) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_wrong_seconds(text):
    with pytest.raises(ConfigError, match=r"--timeout=.* must be a number above 0\. Give seconds"):
        parse_seconds("--timeout", text)


def test_count():
    assert parse_count("--world", "8") == 8


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "\N{SUPERSCRIPT TWO}"])
def test_wrong_count(text):
    with pytest.raises(ConfigError, match=r"--world=.* must be a whole number of at least 1"):
        parse_count("--world", text)
