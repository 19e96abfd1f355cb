from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from paralign.config.load import resolve_config
from paralign.config.parse import SECTIONS
from paralign.config.run import RunConfig


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().batch.seq_len = 3


def test_a_config_travels_to_ranks_and_back():
    config = resolve_config({"model": {"name": "llama", "num_layers": 6}, "mesh": {"cp": 2}})
    assert pickle.loads(pickle.dumps(config)) == config
    assert resolve_config(config.model_dump()) == config
    assert resolve_config(config.model_dump(mode="json")) == config


def test_every_key_has_a_meaning_and_an_example_that_works():
    from paralign.config.source import parse_value

    for section, kind in SECTIONS.items():
        for key, field in kind.model_fields.items():
            assert field.description
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            value = parse_value(str(extra["example"]), "example")
            RunConfig.model_validate({section: {key: value}})


@pytest.mark.parametrize("name", ["gpipe", "GPIPE", "GPipe"])
def test_schedules_are_known_in_any_case(name):
    config = resolve_config({"model": {"name": "llama"}, "pipeline": {"schedule": name}})
    assert config.pipeline.schedule == "GPipe"
