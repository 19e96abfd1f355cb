from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from paralign.align import record
from paralign.align.placements import RankAxes
from paralign.align.scalars import step_loss, step_norms
from paralign.align.step_scalars import StepScalars
from paralign.align.trace import Facts, RankIndex
from paralign.align.trace_reader import TraceReader
from paralign.align.trace_writer import TraceWriter
from tests.align.toys import EVERYTHING, build, train


def test_a_part_that_ranks_along_tp_share_counts_once(tmp_path: Path) -> None:
    for rank in range(2):
        axes = RankAxes()
        axes.groups["tp"] = [0, 1]
        index = RankIndex(rank, 2, "id", coordinates={"tp": rank}, axes=axes.groups, steps=[0])
        with_writer = partial(TraceWriter, tmp_path, index)
        scalars = StepScalars(axes, step=lambda: 0, writer=with_writer)
        scalars.loss(6.0, 3, "sum", "local")
        with_writer().finish(Facts("id", 2, [0], ["loss"]) if rank == 0 else None)
    with TraceReader(tmp_path) as reader:
        loss = step_loss(reader, 0)
    assert loss is not None
    assert (loss.values, loss.tokens) == ((2.0,), (3,))


def test_a_norm_that_was_reported_counts_instead_of_the_one_in_use(tmp_path: Path) -> None:
    """Before clipping or after it; the next step, which reports none, has the one in use."""
    for when in ("before", "after"):
        model = build()
        folder = tmp_path / when
        with record(folder, model, steps=2, what=EVERYTHING) as rec:
            told = [True, False]

            def clip(parameters, max_norm, when=when, told=told, rec=rec):
                is_told = told.pop(0)
                if is_told and when == "before":
                    rec.norm(7.0)
                torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                if is_told and when == "after":
                    rec.norm(7.0)

            train(model, 2, clip=clip)
        with TraceReader(folder) as reader:
            assert step_norms(reader, 0) == (7.0,)
            (in_use,) = step_norms(reader, 1)
            assert in_use != 7.0
