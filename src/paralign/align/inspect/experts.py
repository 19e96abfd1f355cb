"""Expert counts that do not add up: every token goes to ``top_k`` experts, no more and no fewer.

The rows that each expert returned are known from the recorded outputs' shapes, whatever is in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from paralign.align.inspect.factors import explain_factor, simple_factor
from paralign.align.inspect.feed import Feed
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_EXPERT = re.compile(r"^(.*experts?)\.(\d+)$")
_TOP_K = ("top_k", "topk", "experts_per_token", "num_experts_per_tok")


def check_experts(view: View) -> Check:
    """Hold the rows that the experts of a layer computed against the tokens that were fed."""
    check = Check("experts")
    for step in view.steps:
        rows = _rows(view, step)
        if not rows:
            continue
        feed = Feed(view, step)
        tokens = sum(
            part.tokens.numel() for rank in feed.first("tp", "pp") for part in feed.by_rank[rank]
        )
        if not tokens or feed.axes("tp"):
            check.why_not = (
                "how many ranks of tp share the experts' rows is not known"
                if feed.axes("tp")
                else "the tokens that were fed were not recorded: record 'inputs' too"
            )
            continue
        check.looked_at += len(rows)
        check.findings += _judge(view, step, rows, tokens)
        if check.findings:
            break
    if not check.looked_at and check.why_not is None:
        check.why_not = "no outputs of single experts were recorded"
    return check


def _rows(view: View, step: int) -> dict[str, dict[int, int]]:
    """Return per layer and expert how many rows it returned, over all ranks and micro-batches."""
    found: dict[str, dict[int, int]] = {}
    for name, held in view.tensors(Kind.OUTPUT, step).items():
        match = _EXPERT.match(name)
        if match is None:
            continue
        layer = found.setdefault(match[1], {})
        for piece in held:
            shape = piece.entry.held_shape
            layer[int(match[2])] = layer.get(int(match[2]), 0) + math.prod(shape[:-1])
    return found


def _judge(
    view: View, step: int, rows: Mapping[str, Mapping[int, int]], tokens: int
) -> Iterator[Finding]:
    totals = {layer: sum(counts.values()) for layer, counts in rows.items()}
    run = view.reader.facts.run
    said = next((run[name] for name in _TOP_K if isinstance(run.get(name), int)), None)
    top_k = said if said is not None else max(1, round(max(totals.values()) / tokens))
    wrong = {layer: total for layer, total in totals.items() if total != tokens * top_k}
    if not wrong:
        return
    layer, total = next(iter(wrong.items()))
    factor = simple_factor(total / (tokens * top_k), 0.0)
    sets = explain_factor(factor, view.axes) if factor is not None else []
    fewer = total < tokens * top_k
    yield Finding(
        component="forward",
        cause="constant_factor" if sets else "missing_contribution" if fewer else "unknown",
        tensor=layer,
        axes=list(sets[0]) if len(sets) == 1 else [],
        evidence={
            "step": step,
            "rows": total,
            "tokens": tokens,
            "top_k": top_k,
            "layers": len(wrong),
            "counts": {str(number): count for number, count in sorted(rows[layer].items())},
        },
        fix=f"The experts of {layer} computed {total} rows at step {step}, but {tokens} tokens "
        f"with top_k={top_k} are {tokens * top_k}. "
        + (
            "Rows were lost in the dispatch, or dropped for capacity."
            if fewer
            else "Rows were sent twice, or tokens were counted on ranks that hold the same ones."
        ),
        candidates=[" x ".join(axes) for axes in sets] if len(sets) > 1 else [],
    )
