from __future__ import annotations

from pathlib import Path

import pytest

from paralign.config.load import load_config
from paralign.config.presets import PRESETS, find_preset
from paralign.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_the_example_of_the_same_name(name):
    assert load_config(EXAMPLES / f"{name}.yaml") == PRESETS[name]()


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_breaks_no_rule(path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)  # where the README tells to start
    is_single = path.stem.endswith("_1")
    assert (load_config(path).mesh.degrees.world_size == 1) is is_single


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"PRESET='hsd' is not a preset .* Did you mean hsdp\?"):
        find_preset("hsd")
