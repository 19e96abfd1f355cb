from __future__ import annotations

import pytest

from paralign.config.overrides import apply_overrides
from paralign.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mesh.pp=2", {"mesh": {"pp": 2}}),
        ("optimizer.lr=3e-4", {"optimizer": {"lr": 3e-4}}),
        ("align.dtype=null", {"align": {"dtype": None}}),
        ("align.dtype=", {"align": {"dtype": None}}),
        ("context.load_balance=true", {"context": {"load_balance": True}}),
        ("data.source=a=b", {"data": {"source": "a=b"}}),
        ("fsdp.wrap=[[layers.0, layers.1]]", {"fsdp": {"wrap": [["layers.0", "layers.1"]]}}),
        ("model.any_size=3", {"model": {"any_size": 3}}),
        ("mesh={pp: 2}", {"mesh": {"pp": 2}}),
        ("device=cuda", {"device": "cuda"}),
    ],
)
def test_value_is_typed_as_yaml(override, expected):
    assert apply_overrides({}, [override]) == expected


def test_later_wins_and_the_rest_is_kept():
    raw = {"mesh": {"pp": 1, "cp": 2}, "batch": None}
    changed = apply_overrides(raw, ["mesh.pp=2", "mesh.pp=4", "batch.seq_len=8"])
    assert changed == {"mesh": {"pp": 4, "cp": 2}, "batch": {"seq_len": 8}}
    assert raw == {"mesh": {"pp": 1, "cp": 2}, "batch": None}


def test_all_wrong_overrides_are_listed():
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"mesh": 3}, ["mesh.pp=2", "mes.pp=2", "mesh.pp=[", "=1"])
    title, *bullets = str(caught.value).splitlines()
    assert title == "cannot apply --set:"
    assert len(bullets) == 4
    assert "mesh is a whole number in the file, not a section" in bullets[0]
    assert "Did you mean mesh?" in bullets[1]
    assert "not valid YAML" in bullets[2]
    assert "not of the form key.path=value" in bullets[3]
