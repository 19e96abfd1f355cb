"""Judge router choices: discrete, so they are counted, and held against what rounding explains.

Two things are judged for each router and step, over all tokens and over those of each rank, so that
one wrong rank is not thinned out by many right ones: how many choices are not the reference's, and
how far the scores are off that experts are selected by. With replayed choices nothing else would
show a router whose bias is missing, for weights of experts are made from scores without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paralign.align.budget import Budget, Yardstick
from paralign.align.report.choices import describe_router
from paralign.align.verdict import ALIGNED, MISALIGNED, Finding, Report, RouterRow, Routing
from paralign.prove.routing import routing_folder

Counted = Mapping[str, Any]
_SUMS = ("tokens", "choices", "flipped", "expected", "error", "own_error", "base")


def judge_routing(report: Report, trace: Path) -> None:
    """Add to ``report`` what the ranks of ``trace`` counted, and let it change the verdict.

    Args:
        report: What the comparison of the tensors says.
        trace: Trace of the parallel run.
    """
    by_rank = {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(routing_folder(trace).glob("rank*.json"))
    }
    parts: dict[tuple[int, str], dict[int, Counted]] = {}
    for rank, rows in by_rank.items():
        for row in rows:
            parts.setdefault((row["step"], row["router"]), {})[rank] = row
    if not parts:
        return
    budget = Budget(report.dtype, Yardstick(report.yardstick))
    report.routing = _judge(parts, budget)
    if not report.routing.failing:
        return
    first = report.routing.failing[0]
    if report.verdict == ALIGNED and not report.routing.replayed:
        # Tokens went where they chose, and neither loss nor any gradient is off: it was padding.
        report.notes.append(
            f"{describe_router(first)}; loss and every gradient agree, so nothing depends on it"
        )
        return
    if report.verdict == ALIGNED:
        report.verdict = MISALIGNED
        report.why = f"first out of budget: {describe_router(first)}"
    if not report.findings:
        report.findings.append(_finding(first, len(parts[first.step, first.name])))


def _judge(parts: Mapping[tuple[int, str], Mapping[int, Counted]], budget: Budget) -> Routing:
    sums = {key: _add(ranks.values()) for key, ranks in parts.items()}
    total = _add(sums.values())
    rate = total["expected"] / total["choices"]
    rows = []
    for (step, router), ranks in sorted(parts.items(), key=lambda item: item[0][0]):
        own = [_relative(one, "own_error") for (at, _), one in sums.items() if at == step]
        whole = sums[step, router]
        is_first = step == min(at for at, _ in parts)

        def judged(
            counted: Counted,
            whole: Counted = whole,
            own: Sequence[float] = own,
            is_first: bool = is_first,
        ) -> tuple[float, float | None]:
            flips = budget.flips(max(counted["expected"], rate * counted["choices"]))
            if budget.yardstick is Yardstick.FP64:
                return flips, None
            here = max(_relative(counted, "own_error"), _relative(whole, "own_error"))
            return flips, budget.tensor(after_step=not is_first, own=here, others=own)

        allowed, tolerance = judged(whole)
        ranks_off = [
            rank for rank, part in sorted(ranks.items()) if not _is_within(part, *judged(part))
        ]
        rows.append(
            RouterRow(
                name=router,
                step=step,
                choices=whole["choices"],
                flipped=whole["flipped"],
                allowed=allowed,
                eps=_relative(whole, "error") / budget.eps,
                budget_eps=None if tolerance is None else tolerance / budget.eps,
                ok=_is_within(whole, allowed, tolerance) and not ranks_off,
                ranks_off=ranks_off,
            )
        )
    return Routing(replayed=budget.yardstick is not Yardstick.FP64, routers=rows)


def _add(rows: Iterable[Counted]) -> dict[str, Any]:
    chosen = list(rows)
    return {name: sum(row[name] for row in chosen) for name in _SUMS}


def _relative(counted: Counted, what: str) -> float:
    if counted[what] == 0:
        return 0.0
    return math.sqrt(counted[what] / counted["base"]) if counted["base"] else math.inf


def _is_within(counted: Counted, allowed: float, tolerance: float | None) -> bool:
    is_near = tolerance is None or _relative(counted, "error") <= tolerance
    return is_near and counted["flipped"] <= allowed


def _finding(row: RouterRow, num_ranks: int) -> Finding:
    is_single = len(row.ranks_off) == 1 < num_ranks
    if row.is_flipped_only:
        fix = (
            f"{row.name} selects other experts than the reference although its scores agree. "
            "Compare top_k, groups and the dtype of the selection on the ranks that are listed."
        )
    else:
        fix = (
            f"The scores that {row.name} selects by are not the reference's. Compare its bias and "
            "gate on the ranks that are listed, and what it is given."
        )
    return Finding(
        component="forward",
        cause="single_rank" if is_single else "unknown",
        fix=fix,
        tensor=row.name,
        evidence={
            "flipped": row.flipped,
            "choices": row.choices,
            "allowed": row.allowed,
            "score_eps": row.eps,
            "ranks_off": row.ranks_off,
        },
    )
