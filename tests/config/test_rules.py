from __future__ import annotations

import pytest

from paralign.config.load import resolve_config
from paralign.config.rules import RULES, find_problems, plan_of
from paralign.config.run import FsdpSection, RunConfig
from paralign.errors import ConfigError

BASE = {"model": {"name": "llama"}, "mesh": {"pp": 2, "dp_shard": 2, "cp": 2}}


def test_plan_holds_what_the_support_table_looks_at():
    config = resolve_config(
        {
            **BASE,
            "pipeline": {"schedule": "zbvzerobubble", "num_microbatches": 2},
            "fsdp": {"wrap": [["layers.0"]], "reshard_after_forward": False},
        }
    )
    plan = plan_of(config)
    assert (plan.schedule, plan.num_microbatches, plan.pp) == ("ZBVZeroBubble", 2, 2)
    assert (plan.num_layers, plan.num_stages) == (4, 4)
    assert (plan.wrap, plan.reshard_after_forward) == ((("layers.0",),), False)


@pytest.mark.parametrize(("given", "torch"), [("default", None), (True, True), (False, False)])
def test_reshard_as_torch_takes_it(given, torch):
    assert FsdpSection(reshard_after_forward=given).reshard is torch


def test_rules_that_need_an_unsound_key_are_left_out():
    config = RunConfig.model_validate({**BASE, "batch": {"global_batch": 9}})
    assert any("global_batch=9" in problem for problem in find_problems(config))
    for path in ("batch", "batch.global_batch", "mesh.dp_shard", "pipeline"):
        found = find_problems(config, unsound=frozenset({path}))
        assert not any("does not divide" in problem for problem in found), path


def test_rules_need_keys_that_exist():
    for rule in RULES:
        for need in rule.needs:
            value = RunConfig()
            for part in need.split("."):
                value = getattr(value, part)


def test_an_own_model_without_known_heads_is_judged_by_its_sequence_only(tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text("def build(): ...\ndef cut(model): ...\n")
    monkeypatch.chdir(tmp_path)
    raw = {**BASE, "model": {"build": "own_rules:build", "blueprint": "own_rules:cut"}}
    resolve_config(raw)
    with pytest.raises(ConfigError, match="seq_len=63 does not split evenly"):
        resolve_config({**raw, "batch": {"seq_len": 63}})


def test_world_size_is_compared_with_the_mesh():
    resolve_config(BASE, world_size=8)
    with pytest.raises(ConfigError, match="world size 4 does not match the mesh"):
        resolve_config(BASE, world_size=4)
