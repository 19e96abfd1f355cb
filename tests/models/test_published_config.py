from __future__ import annotations

import pytest

from paralign.models.published_config import ConfigReader


def test_sizes_have_their_type() -> None:
    reader = ConfigReader({"a": 3, "b": "4", "c": True, "d": None, "e": 2.5, "f": False})
    assert (reader.size("a"), reader.size("d", 7), reader.size("missing", 8)) == (3, 7, 8)
    assert reader.number("e", 1.0) == 2.5
    assert reader.flag("f", True) is False
    assert reader.problems == []
    reader.size("b")
    reader.size("c")
    reader.size("gone")
    reader.number("b", 1.0)
    reader.flag("a", True)
    assert reader.problems == [
        "b='4' must be a whole number",
        "c=True must be a whole number",
        "gone is missing",
        "b='4' must be a number",
        "a=3 must be true or false",
    ]


def test_a_key_that_nobody_knows_is_refused_unless_it_says_nothing() -> None:
    raw = {"use_cache": True, "qk_layernorm": True, "hidden_act": "gelu", "window": None}
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu", why="gated by silu")
    assert reader.finish() == [
        "hidden_act='gelu': gated by silu",
        "qk_layernorm=True is not known, and it may change what is computed. Remove it from "
        "config.json if it does not",
    ]


@pytest.mark.parametrize(
    ("raw", "theta", "problem"),
    [
        ({}, 100.0, None),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, 100.0, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, 100.0, "rope_type='llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 100.0, "has partial_rotary_factor"),
        ({"rope_parameters": 3}, 100.0, "must be a mapping"),
    ],
)
def test_the_rotary_base_is_found_where_each_version_keeps_it(raw, theta, problem) -> None:
    reader = ConfigReader(raw)
    assert reader.rope_theta(100.0) == theta
    found = reader.finish()
    assert found == [] if problem is None else problem in found[0]


def test_quantised_weights_are_refused() -> None:
    found = ConfigReader({"quantization_config": {"quant_method": "fp8"}}).finish()
    assert len(found) == 1
    assert "quantization_config='fp8'" in found[0]


def test_what_an_export_has_kept_is_read_back() -> None:
    reader = ConfigReader({"paralign": {"balance_loss": 0.5}})
    assert (reader.own("balance_loss", 0.0), reader.own("other", 3)) == (0.5, 3)
    assert ConfigReader({"paralign": 1}).own("balance_loss", 0.0) == 0.0
    assert reader.finish() == []
