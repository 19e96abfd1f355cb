"""Samples on the wrong ranks: different within tp or cp, equal over dp, lost or doubled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paralign.align.inspect.feed import Fed, Feed, all_rows, count_valid, says_something
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import View
from paralign.align.verdict import Finding


def check_inputs(view: View) -> Check:
    """Look at which rows and positions each rank was fed."""
    check = Check("inputs")
    for step in view.steps:
        feed = Feed(view, step)
        check.looked_at += sum(map(len, feed.by_rank.values()))
        unknown = [axis for axis, role in feed.roles.items() if role is None]
        if unknown and feed.by_rank:
            check.notes.append(
                f"which samples belong on ranks of {', '.join(unknown)} is not known by the name"
            )
        for look in _LOOKS:
            check.findings += look(feed)
            if check.findings:
                return check  # what follows would be said of the same wrong rows again
    if not check.looked_at:
        check.why_not = "no inputs were recorded: record with what=(..., 'inputs')"
    return check


def _copies_differ(feed: Feed) -> Iterator[Finding]:
    """Ranks of tp compute the same tokens together, stages of pp one after the other."""
    for role, words in (("tp", "compute the same tokens together"), ("pp", "pass on the same")):
        for members in feed.groups(role):
            said = {fed[0].rank: tuple(tuple(part.rows) for part in fed) for fed in members}
            split = feed.view.split(said)
            if split is not None:
                yield _finding(
                    feed,
                    "different_data",
                    feed.axes(role),
                    sorted(said),
                    f"are fed different tokens, but ranks of {role} {words}. Choose samples by "
                    "the dp coordinate alone, not by the global rank",
                )
                return


def _slices_differ(feed: Feed) -> Iterator[Finding]:
    """Ranks of cp hold slices of the same samples."""
    for members in feed.groups("cp"):
        numbers = {fed[0].rank: [part.samples for part in fed] for fed in members}
        known = all(part is not None for parts in numbers.values() for part in parts)
        if known and len({str(parts) for parts in numbers.values()}) > 1:
            yield _finding(
                feed,
                "different_data",
                feed.axes("cp"),
                sorted(numbers),
                "hold different samples, but ranks of cp hold slices of the same ones. Choose "
                "samples by the dp coordinate alone, then cut each along the sequence",
            )
            return
        yield from _whole_or_short(feed, members)
        yield from _positions(feed, members)


def _whole_or_short(feed: Feed, members: Sequence[Sequence[Fed]]) -> Iterator[Finding]:
    ranks = [fed[0].rank for fed in members]
    rows = {rank: all_rows(fed) for rank, fed in zip(ranks, members, strict=True)}
    length = members[0][0].tokens.shape[1]
    total = sum(fed[0].tokens.shape[1] for fed in members)
    expected = feed.view.reader.facts.run.get("seq_len")
    if says_something(rows[ranks[0]]) and len({str(found) for found in rows.values()}) == 1:
        if _cut_inside(feed, members):
            return
        yield _finding(
            feed,
            "full_sequence",
            feed.axes("cp"),
            ranks,
            f"are all fed the same {length} tokens of each row, so that cp={len(ranks)} copies "
            "are attended to as one sequence. Give each its slice. (If the model cuts them "
            "itself, say so with rec.inputs(tokens of the slice))",
        )
    elif isinstance(expected, int) and total != expected:
        yield _finding(
            feed,
            "different_data",
            feed.axes("cp"),
            ranks,
            f"hold {total} positions of each row together, but seq_len={expected}: "
            f"{abs(expected - total)} are {'missing' if total < expected else 'too many'}. Pad "
            "rows to a multiple of the slices instead of rounding down",
        )


def _cut_inside(feed: Feed, members: Sequence[Sequence[Fed]]) -> bool:
    """Whether the reported token counts say that each rank used its own part of the row only."""
    ranks = {fed[0].rank for fed in members}
    counted = [
        entry.tokens
        for index in feed.view.reader.ranks
        for entry in index.scalars
        if (entry.kind, entry.step, entry.scope) == ("loss", feed.step, "local")
        and index.rank in ranks
    ]
    labels = [part.labels for part in members[0]]
    if not counted or any(count is None for count in counted):
        return False
    if any(part is None for part in labels):
        whole = sum(part.tokens.numel() for part in members[0])
    else:
        whole = sum(count_valid(part) for part in labels if part is not None)
    return sum(count or 0 for count in counted) <= whole


def _positions(feed: Feed, members: Sequence[Sequence[Fed]]) -> Iterator[Finding]:
    """Positions over cp have to be those of the whole row, each once."""
    for parts in zip(*members, strict=False):
        given = [part.positions for part in parts if part.positions is not None]
        if len(given) != len(parts) or any(p.shape[0] != given[0].shape[0] for p in given):
            continue
        ranks = [part.rank for part in parts]
        together = torch.cat([p.to(torch.int64) for p in given], dim=1)
        total = together.shape[1]
        if torch.equal(together.sort(dim=1).values, torch.arange(total).expand_as(together)):
            continue
        restarts = [bool((p[:, 1:] <= p[:, :-1]).any()) for p in given]
        if all(torch.equal(p, given[0]) for p in given) and not any(restarts):
            yield _finding(
                feed,
                "mask_or_positions",
                feed.axes("cp"),
                ranks,
                f"count positions from {int(given[0].min())} each, but they hold different slices. "
                "Give every slice the positions of the whole row",
            )
            return
        if not any(restarts):  # where documents are packed, they begin again: nothing to tell
            yield _finding(
                feed,
                "mask_or_positions",
                feed.axes("cp"),
                ranks,
                f"hold positions that are not 0 to {total - 1} once each: some are missing, some "
                "come twice. Look at how the sequence is cut",
            )
            return


def _equal_over_dp(feed: Feed) -> Iterator[Finding]:
    """Ranks of dp hold different samples; if all of them are equal, the batch is a copy."""
    for axis in feed.axes("dp"):
        equal: list[int] = []
        for rank in feed.first("tp", "pp"):
            rows = all_rows(feed.by_rank[rank])
            for peer in feed.view.group(rank, axis):
                others = feed.by_rank.get(peer)
                if peer <= rank or others is None or not says_something(rows):
                    continue
                if rows == all_rows(others):
                    equal += [rank, peer]
        if equal:
            yield _finding(
                feed,
                "different_data",
                [axis],
                sorted(set(equal)),
                f"are fed exactly the same samples, but ranks of {axis} share the batch. Give "
                "each its own rows: offset the sampler by the dp coordinate",
            )


def _rows_lost_or_doubled(feed: Feed) -> Iterator[Finding]:
    """All rows together have to be the global batch."""
    expected = feed.view.reader.facts.run.get("global_batch")
    ranks = feed.first("tp", "cp", "pp")
    parts = [part for rank in ranks for part in feed.by_rank[rank]]
    samples = [number for part in parts for number in part.samples or () if number >= 0]
    twice = sorted({number for number in samples if samples.count(number) > 1})
    if twice:
        yield _finding(
            feed,
            "different_data",
            [],
            ranks,
            f"hold the samples {twice[:6]} more than once in one step",
        )
        return
    if not isinstance(expected, int) or not parts:
        return
    rows = [row for part in parts for row in part.rows]
    if len(rows) != expected:
        axes = [axis for axis in feed.axes("dp") if feed.view.axes[axis] * len(rows) == expected]
        word = "missing" if len(rows) < expected else "too many"
        yield _finding(
            feed,
            "different_data",
            axes if len(axes) == 1 else [],
            ranks,
            f"hold {len(rows)} rows together, but global_batch={expected}: "
            f"{abs(expected - len(rows))} are {word}",
        )
    elif says_something(rows) and len(set(rows)) <= expected // 2:
        yield _finding(
            feed,
            "different_data",
            [],
            ranks,
            f"hold {len(rows)} rows together, but only {len(set(rows))} different ones: the same "
            "micro-batch or sample is used again and again",
        )


def _finding(
    feed: Feed, cause: str, axes: Sequence[str], ranks: Sequence[int], told: str
) -> Finding:
    shown = f"{', '.join(map(str, ranks[:6]))}{', ...' if len(ranks) > 6 else ''}"
    return Finding(
        component="data",
        cause=cause,
        tensor="tokens",
        axes=list(axes),
        evidence={"step": feed.step, "ranks": list(ranks)},
        fix=f"Rank{'s' if len(ranks) > 1 else ''} {shown} {told}.",
    )


_LOOKS: tuple[Callable[[Feed], Iterator[Finding]], ...] = (
    _copies_differ,
    _slices_differ,
    _equal_over_dp,
    _rows_lost_or_doubled,
)
