from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from paralign.align.report.html import html_of, render_report
from paralign.align.verdict import Coverage
from tests.align.report.reports import (
    HOSTILE,
    finding,
    large_report,
    report,
    row,
    small_report,
)


class Reader(HTMLParser):
    """Collects the elements of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def plain(page: str) -> str:
    """Return the page's text without its script, style and data, on one line."""
    [main] = re.findall(r"(?s)<main.*</main>", page)
    body = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", main).replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'(?s)<script type="application/json" id="data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(text)
    return data


def test_verdict_findings_and_fix_come_first():
    text = plain(render_report(small_report()))
    order = ["Misaligned", "1 finding", "missing reduction", "Fold cp into", "Timeline", "Map"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "It belongs to norm, a RMSNorm (model.py:31)." in text
    assert "To tell them apart: run again with cp=4" in text
    assert "sees nothing of this" in text
    assert "first divergence" in text


def test_an_aligned_report_has_no_findings():
    text = plain(render_report(report([row("grad", "w")])))
    assert "Aligned" in text
    assert "finding" not in text
    assert "first divergence" not in text


def test_every_tensor_is_in_the_data():
    made = small_report()
    assert len(data_of(render_report(made))["rows"]) == len(made.tensors)


def test_findings_lead_to_their_tensor():
    made = small_report()
    [link] = re.findall(r'<code><a href="#tensors" data-row="(\d+)"', render_report(made))
    assert made.tensors[int(link)].name == "norm.weight"
    assert not made.tensors[int(link)].ok


def test_evidence_is_short_and_leaves_out_what_is_no_number():
    evidence = {"eps_before": 4.5e15, "eps_after": float("nan"), "ranks": list(range(64))}
    made = report([row("grad", "w", eps=1e9)], findings=[finding(evidence=evidence)])
    text = plain(render_report(made))
    assert "eps before 4.5e+15" in text
    assert "eps after" not in text
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 52 more" in text


def test_nothing_is_requested_from_anywhere():
    page = Reader(render_report(small_report()))
    outside = [
        (tag, name, value)
        for tag, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data") and not (value or "").startswith("#")
    ]
    assert outside == []
    assert not {"img", "link", "iframe", "object", "embed", "base"} & {t for t, _ in page.elements}


def test_the_policy_allows_only_the_pages_own_script_and_style():
    page = render_report(small_report())
    [policy] = [
        attributes["content"]
        for tag, attributes in Reader(page).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not any("style" in attributes for _, attributes in Reader(page).elements)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_stand(name):
    clean, hostile = (
        report(
            [row("grad", text, eps=1e9), row("moment", text, state=text)],
            why=text,
            findings=[finding(tensor=text, fix=text, separate_by=text, evidence={text: text})],
            coverage=Coverage(skipped=[{"name": text, "why": text}], paths=[text]),
            notes=[text],
            config={text: text},
            facts={"reference": {text: text}, "parallel": {text: text}},
            mesh={text: 2},
            yardstick=text,
        )
        for text in ("layers", name)
    )
    ordinary, page = Reader(render_report(clean)), Reader(render_report(hostile))
    # The same elements with the same attribute names: nothing became markup.
    shape = [(tag, sorted(attributes)) for tag, attributes in page.elements if tag != "wbr"]
    assert shape == [(tag, sorted(attrs)) for tag, attrs in ordinary.elements if tag != "wbr"]
    assert name in data_of(render_report(hostile))["words"]


def test_modules_that_are_wrong_by_themselves_are_listed():
    item = {
        "kind": "output",
        "name": "layers.1.attention",
        "eps": 4.5e15,
        "budget_eps": 100.0,
        "scale": 2.0,
        "class": "Attention",
        "file": "model.py",
        "line": 12,
    }
    located = {"kind": "output", "name": "layers.1.attention", "step": 0}
    rows = [row("output", "layers.1.attention", eps=4.5e15)]
    places: list[dict[str, Any] | None] = [
        {**located, "isolated": isolated} for isolated in ([item], [], None)
    ]
    pages = [plain(render_report(report(rows, located=place))) for place in [*places, None]]
    assert "layers.1.attention Attention model.py:12 4.5e+15 100" in pages[0]
    assert "each module is right, given its inputs" in pages[1]
    assert ["Wrong by itself" in text for text in pages] == [True, True, False, False]


def test_values_that_are_no_numbers_are_shown():
    rows = [row("grad", "w", eps=float("nan")), row("grad", "v", eps=float("inf"))]
    page = render_report(report(rows))
    assert [line[5] for line in data_of(page)["rows"]] == ["nan", "inf"]
    assert "no number" in plain(page)


def test_what_was_not_compared_is_listed():
    coverage = Coverage(
        parameters=9, compared=8, skipped=[{"name": "norm", "why": "not recorded"}], paths=["flash"]
    )
    text = plain(render_report(report([row("grad", "w")], coverage=coverage)))
    assert "8 of 9 parameters compared" in text
    assert "Not compared: 1" in text
    assert "Not exercised flash" in text


def test_facts_of_both_sides_stand_next_to_each_other():
    facts = {
        "reference": {"seed": 0, "world_size": 1, "clip": 1.0},
        "parallel": {"seed": 0, "world_size": 8, "clip": 2.0, "extra": [1, 2]},
    }
    wrong = finding(component="config", evidence={"fact": "clip"}, tensor=None)
    page = render_report(report([row("grad", "w")], facts=facts, findings=[wrong]))
    text = plain(page)
    assert "seed 0 0" in text
    assert "world size 1 8 (differs)" in text
    assert "extra 1, 2" in text
    assert re.search(r'<tr class="wrong"><th scope="row">clip</th><td>1</td><td>2<', page)
    assert re.search(r'<tr class="differs"><th scope="row">world size</th>', page)


def test_a_report_without_numbers_is_a_page_too():
    made = report([], verdict="inconclusive", why="the traces hold no common step", timings={})
    text = plain(render_report(made))
    assert "Inconclusive The traces hold no common step." in text
    assert "Tensors" not in text


@pytest.mark.parametrize("failing", [True, False])
def test_two_thousand_tensors_stay_below_two_megabytes(failing):
    made = large_report(2000, failing=failing)
    assert len(made.tensors) >= 1990
    size = len(html_of(made).encode())
    assert size < 2_000_000, size


def test_many_steps_are_folded_away():
    rows = [row("loss", "loss", step, worst_values=(1.0, 1.0)) for step in range(20)]
    assert "14 more steps" in plain(render_report(report(rows)))
