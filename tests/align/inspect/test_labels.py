from __future__ import annotations

import pytest
import torch

from paralign.align.inspect.labels import shift_of
from paralign.align.trace import ScalarEntry
from tests.align.inspect.runs import batch, feed_trace, only

TOKENS, LABELS = batch()
IGNORED = torch.full((4, 1), -100)


def cut(at, of, size=8):
    return of[:, at * size : (at + 1) * size]


def over_cp(tmp_path, labels_of, tokens_of=lambda at: cut(at, TOKENS), **options):
    return feed_trace(
        tmp_path,
        {"cp": 2},
        lambda at: [{"tokens": tokens_of(at["cp"]), "labels": labels_of(at["cp"])}],
        **options,
    )


def test_shifted_first_and_then_cut(tmp_path):
    assert over_cp(tmp_path, lambda at: cut(at, LABELS)).verdict == "clean"


def test_zig_zag_slices_continue_each_other(tmp_path):
    places = ([0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12)))
    report = over_cp(tmp_path, lambda at: LABELS[:, places[at]], lambda at: TOKENS[:, places[at]])
    assert report.verdict == "clean"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda slice_: IGNORED, "shifted after the cut"),
        (lambda slice_: slice_[:, :1], "rolled within the slice"),
    ],
)
def test_shifted_after_the_cut(tmp_path, end, words):
    def labels_of(at):
        return torch.cat([cut(at, TOKENS)[:, 1:], end(cut(at, TOKENS))], dim=1)

    finding = only(over_cp(tmp_path, labels_of))
    assert (finding.component, finding.cause, finding.axes) == ("data", "label_shift", ["cp"])
    assert words in finding.fix


def test_not_shifted_at_all_loses_targets_only_where_rows_are_cut(tmp_path):
    assert only(over_cp(tmp_path, lambda at: cut(at, TOKENS))).cause == "label_shift"
    whole = feed_trace(tmp_path, {"dp": 1}, lambda at: [{"tokens": TOKENS, "labels": TOKENS}])
    assert whole.verdict == "clean"
    assert "the model has to shift them" in whole.notes[0]


def test_shifted_twice(tmp_path):
    twice = torch.cat([LABELS[:, 1:], IGNORED], dim=1)
    finding = only(
        feed_trace(tmp_path, {"dp": 1}, lambda at: [{"tokens": TOKENS, "labels": twice}])
    )
    assert (finding.cause, finding.evidence["shifts"]) == ("label_shift", [2])


def test_one_rank_shifts_and_another_does_not(tmp_path):
    finding = only(
        feed_trace(
            tmp_path,
            {"dp": 2},
            lambda at: [
                {
                    "tokens": TOKENS[2 * at["dp"] :][:2],
                    "labels": (LABELS, TOKENS)[at["dp"]][2 * at["dp"] :][:2],
                }
            ],
        )
    )
    assert (finding.axes, finding.evidence["shifts"]) == (["dp"], [0, 1])


def test_slices_of_different_samples(tmp_path):
    order = ([0, 1, 2, 3], [3, 2, 1, 0])
    report = over_cp(
        tmp_path,
        lambda at: cut(at, LABELS)[order[at]],
        lambda at: cut(at, TOKENS)[order[at]],
    )
    finding = only(report)
    assert (finding.cause, finding.axes) == ("different_data", ["cp"])


def test_labels_of_the_last_stage_meet_tokens_of_the_first(tmp_path):
    twice = torch.cat([LABELS[:, 1:], IGNORED], dim=1)
    for labels, verdict in ((LABELS, "clean"), (twice, "findings")):
        stages = ({"tokens": TOKENS}, {"labels": labels})

        def fed(at, stages=stages):
            return [stages[at["pp"]]]

        assert feed_trace(tmp_path, {"pp": 2}, fed).verdict == verdict


def test_labels_that_are_no_tokens_cannot_be_judged(tmp_path):
    report = feed_trace(
        tmp_path, {"dp": 1}, lambda at: [{"tokens": TOKENS, "labels": TOKENS.flip(0) + 100}]
    )
    check = next(check for check in report.checks if check.name == "labels")
    assert (report.verdict, check.looked_at) == ("clean", 0)
    assert "no shifted tokens" in str(check.why_not)


def test_the_loss_counts_the_labels_that_are_there(tmp_path):
    labels = LABELS.clone()
    labels[0, 3:9] = -100

    def losses(tokens):
        return lambda at: [ScalarEntry("loss", 0, 1.0, tokens, "mean", "global")]

    assert over_cp(tmp_path, lambda at: cut(at, labels), losses=losses(54)).verdict == "clean"
    finding = only(over_cp(tmp_path, lambda at: cut(at, labels), losses=losses(64)))
    assert (finding.component, finding.cause) == ("loss", "token_weighting")


def test_a_shift_is_only_told_where_it_explains_the_labels():
    assert shift_of(TOKENS, LABELS) == 1
    assert shift_of(TOKENS, TOKENS) == 0
    assert shift_of(TOKENS, TOKENS.flip(1)) is None
    assert shift_of(torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9).long()) is None
