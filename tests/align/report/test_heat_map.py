from __future__ import annotations

import math
import re
from importlib import resources

import pytest

from paralign.align.report.heat_map import LEVEL_NAMES, heat_maps, level_of, split_name
from tests.align.report.reports import row, small_report


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layers.3.attention.wq.weight", ("layers.3", "attention.wq.weight")),
        ("model.layers.11.mlp.experts.7.up.weight", ("model.layers.11", "mlp.experts.*.up.weight")),
        ("embedding.weight", ("embedding", "weight")),
        ("0.weight", ("0", "weight")),
        ("layers.3", ("layers.3", "")),  # the output of a whole layer
        ("model.layers.3", ("model.layers.3", "")),
        ("w2.bias", ("w2", "bias")),
        ("scale", ("scale", "")),
    ],
)
def test_a_name_is_a_layer_and_a_column(name, place):
    assert split_name(name) == place


def test_levels_are_logarithmic_and_what_is_no_number_is_its_own():
    levels = [level_of(eps) for eps in (0, 0.5, 5, 50, 5e3, 5e6, 5e9, math.inf, math.nan)]
    assert levels == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert len(LEVEL_NAMES) == 8


def test_the_worst_step_is_shown_and_failures_are_counted():
    [grad] = heat_maps(small_report().tensors)  # the loss has no place on a map
    assert grad.kind == "grad"
    assert grad.failing == 5
    assert [layer for layer, _ in grad.lines] == [
        "embedding",
        "layers.0",
        "layers.1",
        "norm",
        "head",
    ]
    first = dict(zip(grad.columns, grad.lines[1][1], strict=True))
    assert grad.groups[0] == ("", 1)  # weights of modules that are no layer
    cells = [cell for cell in grad.lines[1][1] if cell is not None]
    assert len(cells) == 6
    assert [cell.text for cell in cells if not cell.ok] == ["4.5e15", "4.5e15"]
    assert {cell.level for cell in cells if cell.ok} == {2}
    assert first["wq.weight"] is not None


def test_a_cell_leads_to_its_tensor():
    report = small_report()
    [grad] = heat_maps(report.tensors)
    for layer, cells in grad.lines:
        for cell in cells:
            if cell is not None:
                assert report.tensors[cell.row].name.startswith(layer)
                assert report.tensors[cell.row].ok == cell.ok


def test_experts_share_a_cell_and_the_worst_is_shown():
    rows = [row("grad", f"layers.0.experts.{at}.up", eps=float(at)) for at in (1, 7, 3)]
    [grad] = heat_maps(rows)
    [(_, cells)] = grad.lines
    assert [cell.text for cell in cells if cell] == ["7"]


def test_every_state_has_its_own_map():
    rows = [row("moment", "w", state=state) for state in ("exp_avg", "exp_avg_sq")]
    assert [heat_map.kind for heat_map in heat_maps(rows)] == [
        "moment exp_avg",
        "moment exp_avg_sq",
    ]


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colors() -> dict[str, tuple[str, str]]:
    css = resources.files("paralign.align.report").joinpath("templates", "page.css").read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    return {name: (light, dark) for name, light, dark in found}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_enough_contrast_everywhere(theme):
    palette = {name: pair[theme] for name, pair in colors().items()}
    pairs = [(f"e{level}-text", f"e{level}") for level in range(len(LEVEL_NAMES))]
    grounds = ("bg", "card", "sunken")
    pairs += [(text, ground) for text in ("text", "soft", "link") for ground in grounds]
    for status in ("good", "bad", "unsure"):
        pairs += [(status, "card"), (status, f"{status}-bg")]
    low = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in low.items() if not value >= 4.5} == {}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_grow_steadily_so_that_no_hue_is_needed_to_order_them(theme):
    lights = [luminance(colors()[f"e{level}"][theme]) for level in range(1, len(LEVEL_NAMES))]
    assert lights == sorted(lights, reverse=theme == 0)
