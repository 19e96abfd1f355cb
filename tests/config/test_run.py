from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from paralign.config.load import resolve_config
from paralign.config.parse import SECTIONS
from paralign.config.run import RunConfig
from paralign.config.source import parse_value


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().batch.seq_len = 3


def test_a_config_travels_to_ranks_and_back():
    config = resolve_config({"model": {"name": "llama", "num_layers": 6}, "mesh": {"cp": 2}})
    assert pickle.loads(pickle.dumps(config)) == config
    assert resolve_config(config.model_dump()) == config
    assert resolve_config(config.model_dump(mode="json")) == config


def test_every_key_has_a_meaning_and_an_example_that_works():
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


def test_the_page_lists_every_key_with_its_default_and_rule():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for section, kind in SECTIONS.items():
        for key, field in kind.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            row = next(
                line for line in page.splitlines() if line.startswith(f"| `{section}.{key}` |")
            )
            _, _, default, expects, meaning, _ = row.split("|")
            assert parse_value(default.strip(" `"), "default") == _plain(field.default)
            assert expects.strip() == extra["expects"]
            assert meaning.strip() == field.description


def test_fields_of_other_configs_are_mapped_to_keys_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = [line.split("|") for line in page.split("## Coming from")[1].splitlines() if "|" in line]
    named = [key for row in rows[2:] for key in re.findall(r"`([a-z]+)\.([a-z_]+)`", row[2])]
    assert len(named) > 10
    for section, key in named:
        assert key in SECTIONS[section].model_fields, (section, key)
    # A row says one of these; none is empty.
    assert all(row[2].strip() and row[3].strip() for row in rows)


def test_the_pages_python_works(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    page = (root / "docs" / "configuration.md").read_text()
    scope: dict[str, object] = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert isinstance(scope["config"], RunConfig)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
