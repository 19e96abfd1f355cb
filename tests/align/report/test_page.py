"""The pages in a real browser: what it draws, how it answers keys, and that nothing else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paralign.align.report.case import FAILED, PASSED, Case, CaseList
from paralign.align.report.html import html_of
from paralign.align.report.numbers import short
from paralign.align.report.page import breakable
from paralign.align.verdict import Report
from tests.align.report.reports import (
    HOSTILE,
    finding,
    large_report,
    report,
    row,
    small_report,
)
from tests.browser import MISSING, Browser, Page, find_browser

Show = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip(MISSING)
    found = Browser(executable, tmp_path_factory.mktemp("browser") / "profile")
    yield found
    found.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    pages: list[Page] = []

    def open_page(result: Report | CaseList, **options: Any) -> Page:
        path = tmp_path / "page.html"
        path.write_text(html_of(result))
        pages.append(browser.open(path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        assert page.trouble == []
        page.close()


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.dataset.row || document.activeElement.id"))


def names(page: Page) -> list[str]:
    return page.texts("#rows td.name")


def test_a_name_may_break_after_its_dots_and_stays_text():
    assert breakable("a.b_c<i>") == "a.<wbr>b_<wbr>c&lt;i&gt;"


def test_the_worst_tensors_are_shown_first(show: Show):
    page = show(small_report())
    assert page.text("h1") == "Misaligned"
    assert page.text("#shown") == "32 of 32"
    assert len(names(page)) == 32
    wrong = page.texts("#rows tr.bad td.name")
    assert names(page)[:5] == wrong
    assert len(wrong) == 5
    assert page.text("#rows tr td:nth-child(4)") == "4.5e+15"


def test_script_and_terminal_write_numbers_alike(show: Show):
    page = show(small_report())
    values = [0.0, 0.12345, 3.14159, 99.96, 999.6, 1234.4, 1e4, 4.56e15, -2.5, 1e-3, 7e-120]
    assert page.evaluate(f"{values}.map(short)") == [short(value) for value in values]
    assert page.evaluate("[NaN, Infinity, -Infinity].map(short)") == ["nan", "inf", "-inf"]


def test_filter_by_words_kind_step_and_failure(show: Show):
    page = show(small_report())
    page.press("/", "wq")
    assert focused(page) == "filter"
    assert len(names(page)) == 4
    page.press(" layers.1")
    assert set(names(page)) == {"layers.1.attention.wq.weight"}
    assert page.text("#shown") == "2 of 32"
    page.press("Escape")
    assert len(names(page)) == 32
    page.click("#failing")
    assert page.text("#shown") == "5 of 32"
    page.click("#failing")
    choose = "(() => {{ const e = document.getElementById('{}'); e.value = '{}';"
    choose += "e.dispatchEvent(new Event('change')); }})()"
    page.evaluate(choose.format("kind", "loss"))
    assert names(page) == ["loss", "loss"]
    page.evaluate(choose.format("step", "1"))
    assert page.text("#shown") == "1 of 32"


def test_nothing_found_says_so(show: Show):
    page = show(small_report())
    page.press("/", "nowhere")
    assert page.text("#shown") == "0 of 32"
    page.press("Enter")  # there is no row to go to
    assert focused(page) == "filter"


def test_order_by_any_column_both_ways(show: Show):
    page = show(report([row("grad", f"layers.{at}.w", eps=float(at * 7 % 11)) for at in range(11)]))
    head = "th[data-key=eps] button"
    page.click(head)
    values = [float(text) for text in page.texts("#rows td:nth-child(4)")]
    assert values == sorted(values, reverse=True)
    assert page.evaluate("document.querySelector('th[data-key=eps]').ariaSort") == "descending"
    page.click(head)
    values = [float(text) for text in page.texts("#rows td:nth-child(4)")]
    assert values == sorted(values)
    page.click("th[data-key=name] button")
    assert names(page) == [f"layers.{at}.w" for at in range(11)]  # 10 after 9
    assert page.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1


def test_infinite_and_undefined_errors_sort_as_the_worst(show: Show):
    values = [3.0, float("nan"), 2.0, float("inf")]
    page = show(report([row("grad", f"w{at}", eps=eps) for at, eps in enumerate(values)]))
    page.click("th[data-key=eps] button")
    texts = page.texts("#rows td:nth-child(4)")
    assert set(texts[:2]) == {"nan", "inf"}
    assert texts[2:] == ["3", "2"]


def test_keys_move_through_the_table_and_open_a_tensor(show: Show):
    made = small_report()
    page = show(made)
    page.press("/", "Enter")
    first = focused(page)
    page.press("ArrowDown", "ArrowDown", "ArrowUp")
    assert focused(page) != first
    page.press("ArrowUp")
    assert focused(page) == first
    page.press("Enter")
    assert page.evaluate("document.getElementById('detail').open")
    assert page.text("#detail-title") == made.tensors[int(first)].label
    text = page.text("#detail-body")
    assert "Out of its budget of 100 eps." in text
    assert "rows 128-255 of 256 hold 99% of the error" in text
    assert "only 2 of the 4 ranks that hold it: 2, 3" in text
    page.press("ArrowDown")
    assert page.text("#detail-title") != made.tensors[int(first)].label
    page.press("Escape")
    assert not page.evaluate("document.getElementById('detail').open")
    assert focused(page) == first  # back where it was


def test_the_end_of_a_long_table_is_one_key_away(show: Show):
    page = show(large_report(1000, failing=False))
    assert len(names(page)) == 100
    page.press("/", "Enter", "End")
    shown, total = len(names(page)), int(page.text("#shown").split()[0].replace(",", ""))
    assert shown == total
    assert page.evaluate("document.activeElement === document.getElementById('rows').lastChild")


def test_tab_reaches_every_control(show: Show):
    page = show(small_report())
    seen = set()
    for _ in range(60):
        page.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "filter", "kind", "step", "failing", "A", "TD", "TR", "BUTTON"} <= seen


def test_the_map_is_walked_with_arrows(show: Show):
    made = small_report()
    page = show(made)
    page.evaluate("document.querySelector('.heat td[tabindex=\"0\"]').focus()")
    assert made.tensors[int(focused(page))].name == "embedding.weight"
    page.press("ArrowDown")
    assert made.tensors[int(focused(page))].name == "norm.weight"  # over the layers' gap
    page.evaluate("document.querySelector('.heat tr:nth-child(2) td:nth-child(4)').focus()")
    before = made.tensors[int(focused(page))].name
    page.press("ArrowRight", "ArrowLeft", "ArrowDown")
    after = made.tensors[int(focused(page))].name
    assert (before, after) == ("layers.0.attention.wq.weight", "layers.1.attention.wq.weight")
    page.press("Enter")
    assert page.text("#detail-title") == after
    assert "eps" in page.evaluate("document.activeElement.closest('dialog').textContent")


def test_each_kind_has_its_map(show: Show):
    rows = [row("grad", "layers.0.w"), row("update", "layers.0.w", eps=1e6)]
    page = show(report(rows))
    shown = "[...document.querySelectorAll('[data-heat]')].map((box) => !box.hidden)"
    assert page.evaluate(shown) == [False, True]  # opens with what is wrong
    page.click("[data-map='0']")
    assert page.evaluate(shown) == [True, False]
    assert page.evaluate("document.querySelector('[data-map=\"0\"]').ariaPressed") == "true"


def test_links_of_findings_and_timeline_open_the_tensor(show: Show):
    page = show(small_report())
    page.click(".subject a")
    assert page.text("#detail-title") == "norm.weight"
    page.click("#close")
    page.click(".station.first a")
    assert page.text("#detail-title") == "layers.0.attention_norm.weight"


def test_details_tell_of_the_same_name_at_other_moments(show: Show):
    rows = [row("grad", "w", eps=1e9), row("moment", "w", state="exp_avg"), row("grad", "v")]
    page = show(report(rows, findings=[finding(tensor="w")]))
    page.click(".subject a")
    assert page.texts("#detail-body table a") == ["moment [exp_avg]"]
    page.click("#detail-body table a")
    assert page.text("#detail-title") == "w [exp_avg]"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(show: Show, dark: bool):
    page = show(small_report(), dark=dark)
    color = "getComputedStyle(document.body).backgroundColor"
    light, black = "rgb(246, 247, 249)", "rgb(13, 17, 23)"
    assert page.evaluate(color) == (black if dark else light)
    page.click("#theme")
    assert (page.text("#theme"), page.evaluate(color)) == ("Theme: light", light)
    page.click("#theme")
    assert (page.text("#theme"), page.evaluate(color)) == ("Theme: dark", black)
    page.click("#theme")
    assert page.text("#theme") == "Theme: system"


def test_without_its_script_the_page_still_tells_what_is_wrong(browser: Browser, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(html_of(small_report()))
    page = browser.open(path, script=False)
    page._call("Emulation.setScriptExecutionDisabled", value=False)  # only to look at it
    visible = str(page.evaluate("document.body.innerText"))
    for text in ("Misaligned", "Fold cp into the FSDP mesh.", "first divergence", "4.5e15"):
        assert text in visible
    assert "need JavaScript" in visible
    assert "Filter by name" not in visible
    assert len(names(page)) == 32
    page.close()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_no_width_makes_the_page_scroll_sideways(show: Show, width: int):
    long = "model.decoder.layers.0." + "very_long_module_name." * 8 + "weight"
    rows = [*small_report().tensors, row("grad", long, eps=1e12)]
    page = show(report(rows, why=long, findings=[finding(tensor=long, fix=long)]), width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click(".subject a")
    dialog = "document.getElementById('detail')"
    assert page.evaluate(f"{dialog}.scrollWidth <= {dialog}.clientWidth")


def test_hostile_names_stay_text_in_every_view(show: Show):
    rows = [row("grad", name, eps=1e9, state=name) for name in HOSTILE]
    rows += [row("loss", "loss", step, worst_values=(1.0, 2.0)) for step in (0, 1)]
    findings = [finding(tensor=name, fix=name, axes=[name], candidates=[name]) for name in HOSTILE]
    page = show(report(rows, findings=findings, why=HOSTILE[0], config={HOSTILE[1]: HOSTILE[1]}))
    found = names(page)
    assert all(any(text.startswith(name) for text in found) for name in HOSTILE)
    page.press("/", "<img", "Enter", "Enter")
    assert page.text("#detail-title") == f"{HOSTILE[0]} [{HOSTILE[0]}]"
    page.press("ArrowDown", "Escape")
    page.evaluate(
        "document.querySelector('.heat td[data-row]').dispatchEvent("
        "new MouseEvent('mouseover', {bubbles: true}))"
    )
    assert page.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def test_the_policy_stops_what_would_slip_through(browser: Browser, tmp_path: Path):
    text = html_of(small_report())
    attack = "<script>document.title = 'owned'</script><img src=x onerror=document.title='owned'>"
    path = tmp_path / "page.html"
    path.write_text(text.replace("</main>", f"{attack}</main>"))
    page = browser.open(path)
    assert str(page.evaluate("document.title")).startswith("misaligned")
    assert any("Content Security Policy" in trouble for trouble in page.trouble)
    page.close()


def test_two_thousand_tensors_are_there_within_seconds(show: Show):
    page = show(large_report(2000))
    assert page.text("#shown").endswith("of 1,995")
    loaded = page.cpu_seconds()
    assert loaded < 5.0
    page.press("/", "wq")
    assert page.text("#shown") == "330 of 1,995"
    assert page.cpu_seconds() - loaded < 2.0


def test_cases_can_be_filtered_and_ordered(show: Show):
    cases = tuple(
        Case(
            name=f"pp{at}",
            outcome=FAILED if at == 2 else PASSED,
            message="off" if at == 2 else "fine",
            text="Fold cp into it." if at == 2 else "",
            seconds=float(20 - at),
            columns={"worst": f"{at} eps"},
        )
        for at in range(1, 12)
    )
    made = CaseList(
        title="paralign sweep", verdict="misaligned", outcome=FAILED, why="one is off", cases=cases
    )
    page = show(made)
    assert page.text("#shown") == "11 of 11"
    assert page.text("#rows tr td") == "pp2"
    assert page.evaluate("document.querySelector('#rows details').open")
    page.click("#table th:nth-child(1) button")
    assert page.texts("#rows td.name")[-3:] == ["pp9", "pp10", "pp11"]
    page.click("#table th:last-child button")
    assert page.text("#rows tr td") == "pp11"  # the quickest
    page.click("#failing")
    assert page.text("#shown") == "1 of 11"
    page.press("/", "nowhere")
    assert page.text("#shown") == "0 of 11"
    page.press("Escape")
    assert page.text("#shown") == "1 of 11"
