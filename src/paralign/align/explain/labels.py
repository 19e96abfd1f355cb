"""Explain labels that are not the reference's at the same tokens: shifted, or another row's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.verdict import Finding

LABEL_SHIFT = "label_shift"
DIFFERENT_DATA = "different_data"

IGNORED = -100

Batch = tuple[Tensor, Tensor, Tensor, tuple[int, ...]]
"""Labels, what they should be, the tokens, and the tokens' global positions."""


def explain_labels(
    context: Context, by_rank: Mapping[int, Sequence[Batch]], step: int
) -> list[Finding]:
    """Explain labels that differ.

    Args:
        context: The comparison.
        by_rank: Per rank its micro-batches.
        step: The step.
    """
    wrong = {
        rank: [batch for batch in batches if not torch.equal(batch[0], batch[1])]
        for rank, batches in by_rank.items()
    }
    wrong = {rank: batches for rank, batches in wrong.items() if batches}
    if not wrong:
        return []
    batches = [batch for found in wrong.values() for batch in found]
    live = [axis for axis in context.mesh.live if axis in ("cp", "sp")]
    if live and all(_only_at_ends(batch) for batch in batches):
        return [
            _finding(
                LABEL_SHIFT,
                tuple(live[:1]),
                wrong,
                step,
                f"Only the last label of each slice is wrong: labels were shifted after the split "
                f"over {live[0]}, so that a slice's last token lost its target. Shift first, then "
                "split.",
            )
        ]
    for shift in (1, -1, 2):
        if all(_is_shifted(batch, shift) for batch in batches):
            return [
                _finding(
                    LABEL_SHIFT,
                    (),
                    wrong,
                    step,
                    f"Labels are {shift} further on than they should be: they are shifted twice, "
                    "in the data and in the model, or not at all. Shift them once.",
                )
            ]
    axes = context.mesh.coordinates_that_tell(sorted(wrong), sorted(by_rank))
    return [
        _finding(
            DIFFERENT_DATA,
            tuple(context.mesh.named(axes)),
            wrong,
            step,
            f"The labels on rank {', '.join(map(str, sorted(wrong)))} are not those of the tokens: "
            "they come from other rows. Read tokens and labels from one batch on every stage.",
        )
    ]


def _only_at_ends(batch: Batch) -> bool:
    """Whether all wrong labels are at the end of a run of positions."""
    labels, due, _, places = batch
    ends = [i for i in range(len(places)) if i + 1 == len(places) or places[i + 1] != places[i] + 1]
    columns = (labels != due).any(dim=0).nonzero().flatten().tolist()
    return set(columns) <= set(ends) and len(ends) < len(places)


def _is_shifted(batch: Batch, shift: int) -> bool:
    """Whether labels are those that are due ``shift`` places further on, where both are known."""
    labels, due, tokens, _ = batch
    pairs = list(_overlap(labels, due, shift))
    if all(torch.equal(a, b) for a, b in pairs):
        return True
    if shift != -1:
        return False
    # Not shifted at all: the labels are the tokens.
    known = labels != IGNORED
    return bool((labels == tokens)[known].all()) and bool(known.any())


def _overlap(labels: Tensor, due: Tensor, shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    length = labels.shape[1]
    for row in range(labels.shape[0]):
        mine = labels[row, max(0, -shift) : length - max(0, shift)]
        other = due[row, max(0, shift) : length - max(0, -shift)]
        yield mine, other


def _finding(
    cause: str, axes: tuple[str, ...], wrong: Mapping[int, object], step: int, fix: str
) -> Finding:
    return Finding(
        component="data",
        cause=cause,
        tensor="labels",
        axes=list(axes),
        evidence={
            "eps_before": None,
            "eps_after": None,  # no tensor was corrected: tokens are equal or they are not
            "share_beyond_2e-3": None,
            "step": step,
            "ranks": sorted(wrong),
        },
        fix=fix,
    )
