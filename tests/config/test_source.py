from __future__ import annotations

import pytest

from paralign.config.source import describe_type, parse_value, read_config
from paralign.errors import ConfigError


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "3E-04", "0.0003", "+3e-4"])
def test_a_number_with_an_exponent_needs_no_dot(text):
    assert parse_value(text, "t") == pytest.approx(3e-4, rel=1e-15)


@pytest.mark.parametrize("text", ["1F1B", "e5", "1e", "x3e-4"])
def test_other_text_stays_text(text):
    assert parse_value(text, "t") == text


def test_merge_keys_still_work(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text("mesh: &m {pp: 2}\nbatch: {<<: *m, seq_len: 3}\n")
    assert read_config(path)["batch"] == {"pp": 2, "seq_len": 3}


def test_nested_brackets_are_refused_not_crashed_on(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text("mesh: " + "[" * 2000)
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_config(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "a boolean"), (1, "a whole number"), (1.5, "a number"), ("x", "text"), (None, "null")],
)
def test_describe_type(value, words):
    assert describe_type(value) == words
