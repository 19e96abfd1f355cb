from __future__ import annotations

import pytest

from paralign.align.fused import Fused
from paralign.align.name_rules import NameRules, match
from paralign.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.b", "a.b", ()),
        ("a.b", "axb", None),
        ("*.wq.weight", "layers.0.wq.weight", ("layers.0",)),
        ("layers.*.mlp.*", "layers.10.mlp.w1.weight", ("10", "w1.weight")),
        ("layers.*", "xlayers.0", None),
        ("*", "anything.at.all", ("anything.at.all",)),
    ],
)
def test_patterns(pattern: str, name: str, expected: tuple[str, ...] | None) -> None:
    assert match(pattern, name) == expected


def test_a_star_stands_for_the_same_text_in_the_new_name() -> None:
    rules = NameRules({"decoder.layers.*.mlp.fc2.*": "layers.*.w2.*", "head": "lm_head"})
    assert [new.name for new in rules.of("decoder.layers.7.mlp.fc2.weight")] == [
        "layers.7.w2.weight"
    ]
    assert [new.name for new in rules.of("other")] == ["other"]
    assert rules.unused() == ["head"]
    assert [new.name for new in rules.of("head")] == ["lm_head"]
    assert rules.unused() == []


def test_the_name_itself_goes_before_patterns_and_the_first_pattern_before_others() -> None:
    rules = NameRules({"*.w": "first.*", "a.*": "second.*", "a.w": "exact"})
    assert [rules.of(name)[0].name for name in ("a.w", "b.w", "a.v")] == [
        "exact",
        "first.b",
        "second.v",
    ]


def test_a_fused_parameter_has_a_name_per_part() -> None:
    fused = Fused({"*.wq": 2, "*.wk": 1})
    for rule in (
        {"*.wqk": fused},
        lambda name: Fused({f"{name[:-4]}.wq": 2, f"{name[:-4]}.wk": 1}),
    ):
        names = NameRules(rule).of("l.0.wqk")
        assert [new.name for new in names] == ["l.0.wq", "l.0.wk"]
        assert [new.part.index for new in names if new.part] == [0, 1]


def test_wrong_new_names() -> None:
    with pytest.raises(ConfigError, match=r"names\['a.\*'\]='\*.\*' has 2 '\*', but the pattern"):
        NameRules({"a.*": "*.*"}).of("a.b")
    with pytest.raises(ConfigError, match=r"names\['a'\]='' must be the new name, or pa.Fused"):
        NameRules({"a": ""}).of("a")
    with pytest.raises(ConfigError, match=r"names\['a'\]=None must be the new name"):
        NameRules(lambda name: None).of("a")  # type: ignore[arg-type, return-value]
