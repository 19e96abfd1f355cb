from __future__ import annotations

import pytest

from paralign.config.parse import explain_unknown, parse, show
from paralign.config.run import MeshSection


def test_what_is_sound_is_read_and_the_rest_named():
    parsed = parse({"mesh": {"pp": "two", "cp": 4, "x": 1}, "fsdp": 3, "nope": 1})
    assert parsed.config.mesh == MeshSection(cp=4)
    assert parsed.unsound == {"mesh.pp", "mesh.x", "fsdp", "nope"}
    assert len(parsed.problems) == 4


def test_one_problem_a_key_however_much_is_wrong_in_it():
    parsed = parse({"pipeline": {"layers_per_stage": [0, "a", True]}, "fsdp": {"wrap": [[1], 2]}})
    assert len(parsed.problems) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), ("a", "'a'"), ((1, 2), "[1, 2]"), (0.1, "0.1")],
)
def test_values_read_as_in_yaml(value, text):
    assert show(value) == text


def test_long_values_are_shortened():
    assert len(show("x" * 10_000)) < 100
    assert len(show(list(range(10_000)))) < 100


def test_a_value_that_holds_itself_is_refused():
    wrap: list[object] = []
    wrap.append(wrap)
    assert len(parse({"fsdp": {"wrap": wrap}}).problems) == 1


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("mesh", "dp_shards", "mesh.dp_shard"),
        ("mesh", "seq_len", "batch.seq_len"),
        ("", "lr", "optimizer.lr"),
        ("", "meshh", "mesh"),
    ],
)
def test_the_nearest_key_is_suggested(section, key, meant):
    assert explain_unknown(section, key).endswith(f"Did you mean {meant}?")
