from __future__ import annotations

from paralign.align.report.timeline import kind_title, timeline
from tests.align.report.reports import finding, report, row, small_report


def test_moments_are_in_order_and_the_first_divergence_is_marked():
    lines = timeline(small_report())
    assert [line.title for line in lines] == ["step 0", "step 1"]
    assert [(s.title, s.text) for s in lines[0].stations] == [
        ("loss", "0.5 eps"),
        ("gradients", "15 in budget, worst 1.5 eps"),
    ]
    wrong = lines[1].stations[1]
    assert wrong.text == "5 of 15 out of budget, worst layers.0.attention_norm.weight"
    assert (wrong.ok, wrong.is_first) == (False, True)
    assert [line.ok for line in lines] == [True, False]
    assert sum(station.is_first for line in lines for station in line.stations) == 1


def test_a_station_leads_to_the_first_of_what_is_made_in_order_else_to_the_worst():
    values = {"a": 1.0, "b": 1e3, "c": 1e9}
    outputs = [row("output", name, eps=eps) for name, eps in values.items()]
    grads = [row("grad", name, eps=eps) for name, eps in values.items()]
    of_outputs, of_grads = timeline(report([*outputs, *grads]))[0].stations
    assert (of_outputs.text, of_outputs.row) == ("2 of 3 out of budget, first b", 1)
    assert (of_grads.text, of_grads.row) == ("2 of 3 out of budget, worst c", 5)


def test_only_the_first_of_several_divergences_is_marked():
    rows = [row("loss", "loss", eps=1e3, budget=50.0), row("grad", "w", eps=1e9)]
    first, second = timeline(report(rows))[0].stations
    assert (first.text, first.is_first) == ("1000 eps, out of budget", True)
    assert (second.ok, second.is_first) == (False, False)


def test_facts_that_differ_come_before_any_number():
    rows = [row("grad", "w", eps=1e9)]
    made = report(rows, findings=[finding(component="config", cause="different_config")])
    facts, grad = timeline(made)[0].stations
    assert (facts.title, facts.text, facts.is_first) == ("facts and config", "1 differ", True)
    assert not grad.is_first


def test_facts_that_agree_say_so():
    made = report([row("grad", "w")], facts={"reference": {"a": 1}, "parallel": {"a": 1}})
    assert [s.text for s in timeline(made)[0].stations] == ["agree", "1.5 eps"]


def test_nothing_compared_is_an_empty_line_of_time():
    assert timeline(report([])) == []


def test_what_is_only_listed_is_no_failure():
    rows = [row("param_after", name, eps=1e9, budget=None) for name in "ab"]
    [line] = timeline(report(rows))
    assert [(s.text, s.ok) for s in line.stations] == [("2 listed, not gated", True)]


def test_equal_tensors_are_called_equal():
    rows = [row("param", name, eps=0.0, budget=0.0) for name in "ab"]
    assert timeline(report(rows))[0].stations[0].text == "all 2 equal"


def test_unknown_kinds_are_shown_by_their_name():
    assert kind_title("router_counts") == "router counts"
