"""A report as one page to open in a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paralign.align.report.case import CaseList, mesh_name, place_of, split_axes
from paralign.align.report.cases_page import render_cases
from paralign.align.report.curves import curves
from paralign.align.report.heat_map import LEVEL_NAMES, HeatMap, heat_maps
from paralign.align.report.numbers import short
from paralign.align.report.page import render_page
from paralign.align.report.tensor_data import tensor_data
from paralign.align.report.timeline import kind_title, timeline
from paralign.align.verdict import Finding, Report, TensorRow

_FIRST_ROWS = 50
"""Tensors that the page shows without its script."""
_FEW = 12
"""Items of a list that are written out."""
_YARDSTICKS = {
    "fp64": "budget: fixed multiples of eps",
    "truth": "budget: the fp64 truth",
    "noise": "budget: a second reference",
    "uncalibrated": "budget: uncalibrated table",
}


def html_of(result: Report | CaseList) -> str:
    """Return the page of a comparison, or that of many cases."""
    return render_cases(result) if isinstance(result, CaseList) else render_report(result)


def render_report(report: Report) -> str:
    """Return the page of one comparison: self-contained, without requests to anywhere."""
    maps = heat_maps(report.tensors)
    return render_page(
        "report.html.j2",
        scripts=("dom.js", "details.js", "report.js"),
        title=f"{report.verdict}: {mesh_name(report)}",
        report=report,
        tiles=_tiles(report),
        findings=[_finding(report, finding) for finding in report.findings],
        isolated=None if report.located is None else report.located.get("isolated"),
        timeline=timeline(report),
        maps=maps,
        shown_map=_shown(maps),
        levels=LEVEL_NAMES,
        curves=curves(report.tensors),
        facts=_facts(report),
        config=_config_text(report.config),
        ordered=_worst_first(report.tensors)[:_FIRST_ROWS],
        kind_title=kind_title,
        data=tensor_data(report.tensors),
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Return the numbers that matter: name, value, and what to know about it."""
    coverage = report.coverage
    gated = [row for row in report.tensors if row.budget_eps is not None]
    failing = sum(not row.ok for row in report.tensors)
    tiles = []
    if report.loss is not None:
        tiles.append(
            ("loss", f"{report.loss['parallel']:.6g}", f"relative {short(report.loss['rel'])}")
        )
    if report.worst is not None:
        tiles.append(("worst", f"{short(report.worst.eps)} eps", report.worst.label))
    if report.tensors:
        tiles.append(("out of budget", str(failing), f"of {len(gated):,} comparisons"))
    if report.routing is not None:
        routing = report.routing
        replayed = "replayed as in the reference" if routing.replayed else "not replayed"
        tiles.append(
            ("choices that differ", f"{routing.flipped:,}", f"of {routing.choices:,}, {replayed}")
        )
    tiles.append(
        (
            "parameters",
            f"{coverage.compared}/{coverage.parameters}",
            f"{coverage.elements:,} elements",
        )
    )
    tiles.append(("dtype", report.dtype, _YARDSTICKS.get(report.yardstick, report.yardstick)))
    mesh = [f"{axis} {degree}" for axis, degree in split_axes(report).items()]
    tiles.append(("mesh", " x ".join(mesh) or "one rank", ""))
    return tiles


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    label = finding.tensor
    found = [at for at, row in enumerate(report.tensors) if label in (row.label, row.name)]
    failing = [at for at in found if not report.tensors[at].ok]
    return {
        "finding": finding,
        "title": finding.cause.replace("_", " "),
        "place": place_of(finding),
        "row": next(iter([*failing, *found]), None),
        "evidence": [
            (name.replace("_", " "), _value(value))
            for name, value in finding.evidence.items()
            if name != "share_beyond_2e-3" and value is not None and value == value  # no NaN
        ],
        "missed": _missed(finding),
    }


def _missed(finding: Finding) -> str:
    share = finding.evidence.get("share_beyond_2e-3")
    if not isinstance(share, int | float):
        return ""
    if share == 0:
        return "allclose(rtol=2e-3, atol=2e-3) sees nothing of this."
    return f"allclose(rtol=2e-3, atol=2e-3) refuses {share:.2%} of the elements."


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        rest = f" and {len(value) - _FEW} more" if len(value) > _FEW else ""
        return (", ".join(map(_value, value[:_FEW])) or "none") + rest
    return str(value)


def _facts(report: Report) -> list[dict[str, Any]]:
    """Return both sides' facts next to each other; those that differ are marked."""
    ours, theirs = (report.facts.get(side, {}) for side in ("reference", "parallel"))
    refused = {finding.evidence.get("fact") for finding in report.findings}
    rows = []
    for name in dict.fromkeys([*ours, *theirs]):
        values = [_value(side[name]) if name in side else "" for side in (ours, theirs)]
        differs = name in ours and name in theirs and ours[name] != theirs[name]
        mark = ("wrong" if name in refused else "differs") if differs else ""
        rows.append({"name": name, "values": values, "mark": mark})
    return rows


def _config_text(config: Any) -> str:
    return "" if config is None else json.dumps(config, indent=2, default=str)


def _shown(maps: Sequence[HeatMap]) -> int:
    """Return which map to open with: the first with failures, else that of the gradients."""
    for at, heat_map in enumerate(maps):
        if heat_map.failing:
            return at
    return next((at for at, heat_map in enumerate(maps) if heat_map.kind == "grad"), 0)


def _worst_first(rows: Sequence[TensorRow]) -> list[TensorRow]:
    return sorted(rows, key=lambda row: (row.ok, -row.strain, not row.eps > 0, -row.eps))
