"""Labels that are not the next token: not shifted, shifted twice, or shifted after the cut.

Within a row label ``t`` is token ``t + 1``. Where a sequence is cut over ranks, the last label of a
slice is the first token of the next one, which only the whole row knows::

    tokens   a b c d | e f g h     labels  b c d e | f g h -   right
                                           b c d - | f g h -   shifted after the cut: e is lost
                                           b c d a | f g h e   rolled within the slice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paralign.align.inspect.feed import Fed, Feed, count_valid
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import View
from paralign.align.verdict import Finding

_SHIFTS = (1, 0, 2, -1)
_MATCHES = 0.6  # share of labels that a shift has to explain; a cut inside of a slice costs a few
_SEAM = 0.9


def check_labels(view: View) -> Check:
    """Hold labels against tokens, within rows and where slices meet."""
    check = Check("labels")
    for step in view.steps:
        feed = Feed(view, step)
        shifts = {
            (fed.rank, fed.micro_batch): shift
            for parts in feed.by_rank.values()
            for fed in parts
            if fed.labels is not None and (shift := shift_of(fed.tokens, fed.labels)) is not None
        }
        labelled = [
            fed for parts in feed.by_rank.values() for fed in parts if fed.labels is not None
        ]
        check.looked_at += len(shifts)
        if labelled and not shifts:
            check.why_not = "the labels are no shifted tokens, so what they should be is not known"
        check.findings += _wrong_shift(feed, shifts)
        if not check.findings:
            check.findings += _seams(feed, set(shifts.values()))
        if not check.findings:
            check.findings += _counts(feed, set(shifts.values()))
        if shifts and set(shifts.values()) == {0} and not check.findings:
            check.notes.append(
                "labels are the tokens themselves: the model has to shift them, before any cut"
            )
        if check.findings:
            break
    if not check.looked_at and check.why_not is None:
        check.why_not = "no labels were recorded: record with what=(..., 'inputs')"
    return check


def shift_of(tokens: Tensor, labels: Tensor) -> int | None:
    """Return how far labels are ahead of tokens; None if no shift explains them."""
    best, share = None, 0.0
    for shift in _SHIFTS:
        seen, valid = _matches(tokens, labels, shift)
        if valid and seen / valid > share:
            best, share = shift, seen / valid
    varied = all(len(set(row)) > 1 for row in tokens.tolist())
    return best if share >= _MATCHES and varied else None


def _matches(tokens: Tensor, labels: Tensor, shift: int) -> tuple[int, int]:
    length = tokens.shape[1]
    if length <= abs(shift) + 1:
        return 0, 0
    ahead = tokens[:, max(shift, 0) : length + min(shift, 0)]
    own = labels[:, max(-shift, 0) : length - max(shift, 0)]
    valid = own >= 0
    return int(((ahead == own) & valid).sum()), int(valid.sum())


def _wrong_shift(feed: Feed, shifts: dict[tuple[int, int], int]) -> Iterator[Finding]:
    wrong = {key: shift for key, shift in shifts.items() if shift not in (0, 1)}
    mixed = len(set(shifts.values())) > 1
    if not wrong and not mixed:
        return
    said = {rank: shift for (rank, _), shift in shifts.items()}
    split = feed.view.split(said)
    ranks = sorted({rank for rank, _ in wrong or shifts})
    told = ", ".join(f"{shift}" for shift in sorted(set(shifts.values())))
    yield _finding(
        feed,
        list(split.axes) if split else [],
        ranks,
        f"have labels that are {told} positions ahead of the tokens, where 1 is due. Shift once: "
        "in the collator or in the model, not in both",
        {"shifts": sorted(set(shifts.values()))},
    )


def _seams(feed: Feed, shifts: set[int]) -> Iterator[Finding]:
    """Look at the last label of every slice over cp."""
    for members in feed.groups("cp"):
        ranks = [fed[0].rank for fed in members]
        same = {tuple(tuple(part.rows) for part in fed) for fed in members}
        if len(same) == 1:
            continue  # whole sequences: said where the inputs are looked at
        if shifts == {0}:
            yield _finding(
                feed,
                feed.axes("cp"),
                ranks,
                "hold slices whose labels are not shifted. A model that shifts them itself loses "
                "the target of each slice's last token: shift the whole row first, then cut it",
                {"shifts": [0]},
            )
            return
        parts = list(zip(*members, strict=False))
        if shifts != {1} or any(p.labels is None for group in parts for p in group):
            continue
        finding = _seam_finding(feed, ranks, parts)
        if finding is not None:
            yield finding
            return


def _seam_finding(
    feed: Feed, ranks: Sequence[int], parts: Sequence[Sequence[Fed]]
) -> Finding | None:
    rates = []
    for layout in (_zig_zag, _slices):
        seams = [_seam_tokens(layout(group)) for group in parts]
        last, following, own = (torch.cat(found) for found in zip(*seams, strict=True))
        rates.append(_rate(last, following))
    if max(rates) >= _SEAM:
        return None
    if not bool((last >= 0).any()):
        return _finding(
            feed,
            feed.axes("cp"),
            ranks,
            "hold slices whose last label is ignored: labels were shifted after the cut, so that "
            "each slice's last token lost its target. Shift the whole row first, then cut it",
            {"seams": len(last)},
        )
    if _rate(last, own) >= _SEAM:
        return _finding(
            feed,
            feed.axes("cp"),
            ranks,
            "hold slices whose last label is their own first token: labels were rolled within the "
            "slice. Shift the whole row first, then cut it",
            {"seams": len(last), "match": max(rates)},
        )
    if all(p.positions is not None for group in parts for p in group):
        return None  # cut in another way, and said so
    return Finding(
        component="data",
        cause="different_data",
        tensor="tokens",
        axes=feed.axes("cp"),
        evidence={"step": feed.step, "ranks": list(ranks), "match": max(rates)},
        fix=f"Ranks {', '.join(map(str, ranks[:6]))} of cp hold slices that do not continue each "
        "other: the last label of one is not the first token of the next, neither in order nor in "
        "zig-zag. Give them slices of the same samples. (If they are cut in another way, record "
        "their positions.)",
    )


def _slices(group: Sequence[Fed]) -> list[tuple[Tensor, Tensor]]:
    """Return the pieces of the row in the order of a plain cut: tokens and labels."""
    return [(part.tokens, part.labels) for part in group if part.labels is not None]


def _zig_zag(group: Sequence[Fed]) -> list[tuple[Tensor, Tensor]]:
    """Return them where every rank holds a piece from the front and its mirror from the back."""
    half = group[0].tokens.shape[1] // 2
    pairs = _slices(group)
    if half < 1:
        return pairs
    front = [(tokens[:, :half], labels[:, :half]) for tokens, labels in pairs]
    back = [(tokens[:, half:], labels[:, half:]) for tokens, labels in reversed(pairs)]
    return front + back


def _seam_tokens(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return of every seam the last label, the next piece's first token, and its own first."""
    last = [labels[:, -1] for _, labels in pieces[:-1]]
    following = [tokens[:, 0] for tokens, _ in pieces[1:]]
    own = [tokens[:, 0] for tokens, _ in pieces[:-1]]
    return torch.cat(last), torch.cat(following), torch.cat(own)


def _rate(last: Tensor, expected: Tensor) -> float:
    valid = last >= 0
    return float(((last == expected) & valid).sum()) / max(int(valid.sum()), 1)


def _counts(feed: Feed, shifts: set[int]) -> Iterator[Finding]:
    """The number of tokens reported with the loss is the number of labels that count."""
    if shifts != {1}:
        return
    parts = [part for rank in feed.first("tp", "pp") for part in feed.by_rank[rank]]
    if not parts or any(part.labels is None for part in parts):
        return
    valid = sum(count_valid(part.labels) for part in parts if part.labels is not None)
    reported = {
        entry.tokens
        for index in feed.view.reader.ranks
        for entry in index.scalars
        if (entry.kind, entry.step, entry.scope) == ("loss", feed.step, "global")
    }
    if len(reported) == 1 and None not in reported and reported != {valid}:
        (count,) = reported
        yield Finding(
            component="loss",
            cause="token_weighting",
            tensor="tokens",
            evidence={"step": feed.step, "reported": count, "labels": valid},
            fix=f"The loss of step {feed.step} is said to be over {count} tokens, but {valid} "
            "labels count (are not negative) over all micro-batches, dp and cp ranks. Divide by "
            "their number.",
        )


def _finding(
    feed: Feed,
    axes: Sequence[str],
    ranks: Sequence[int],
    told: str,
    evidence: dict[str, object],
) -> Finding:
    shown = f"{', '.join(map(str, ranks[:6]))}{', ...' if len(ranks) > 6 else ''}"
    return Finding(
        component="data",
        cause="label_shift",
        tensor="labels",
        axes=list(axes),
        evidence={"step": feed.step, "ranks": list(ranks), **evidence},
        fix=f"Rank{'s' if len(ranks) > 1 else ''} {shown} {told}.",
    )
