"""Wrong tokens, labels or positions on some ranks: what a run is fed, not what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paralign.batch import LocalBatch
from paralign.loss import IGNORE_INDEX
from paralign.parallel.stage import Stage
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun

# Batches here are a rank's share, tokens, labels and positions [rows, slice]; the counts beside
# them stay as they were, because no real loop notices such a fault by counting.


def _rows_from_neighbour(run: FaultRun, axis: str) -> None:
    """Let each rank read the rows of the rank before it on ``axis``; the first keeps its own."""
    group = run.mesh[axis].get_group()

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        for name in ("tokens", "labels"):
            tensors[name] = _from_first(tensors[name], group)

    run.on_batch(change)


def _from_first(tensor: Tensor, group: Any) -> Tensor:
    """Return what the first rank of ``group`` holds."""
    import torch.distributed as dist

    copy = tensor.clone()
    dist.broadcast(copy, group=group, group_src=0)
    return copy


@fault(needs={"dp_shard"}, component="data", axes={"dp_shard"}, cause="different_data")
def same_rows_on_every_dp_shard_rank(run: FaultRun) -> None:
    """Every dp_shard rank reads the rows of the first: one sampler seed and no offset."""
    _rows_from_neighbour(run, "dp_shard")


@fault(needs={"dp_replicate"}, component="data", axes={"dp_replicate"}, cause="different_data")
def same_rows_on_every_replica(run: FaultRun) -> None:
    """Every dp_replicate rank reads the rows of the first."""
    _rows_from_neighbour(run, "dp_replicate")


@fault(needs={"cp"}, component="data", axes={"cp"}, cause="different_data")
def other_samples_on_one_cp_rank(run: FaultRun) -> None:
    """The last cp rank slices other samples than its peers: batches dealt by global rank."""
    if run.coordinate["cp"] != run.mesh["cp"].size() - 1:
        return

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        for name in ("tokens", "labels"):
            tensors[name] = tensors[name].roll(1, 0).contiguous()

    run.on_batch(change)


@fault(needs={"pp", "accumulation"}, component="data", axes={"pp"}, cause="different_data")
def labels_of_another_batch_on_the_last_stage(run: FaultRun) -> None:
    """The last stage's loader is one row ahead of the first stage's."""
    if not any(isinstance(module, Stage) and module.is_last for module in run.modules):
        return

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        tensors["labels"] = tensors["labels"].roll(1, 0).contiguous()

    run.on_batch(change)


@fault(needs={"cp"}, component="data", axes={"cp"}, cause="label_shift")
def labels_shifted_after_the_split(run: FaultRun) -> None:
    """Labels are shifted on each slice, so that a slice's last token loses its target."""

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        labels = tensors["labels"].clone()
        labels[:, -1] = IGNORE_INDEX
        tensors["labels"] = labels

    run.on_batch(change)


@fault(component="data", cause="label_shift")
def labels_shifted_twice(run: FaultRun) -> None:
    """Labels are shifted in the collator and once more in the model's loss."""

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        labels = tensors["labels"]
        again = torch.full_like(labels, IGNORE_INDEX)
        again[:, :-1] = labels[:, 1:]
        tensors["labels"] = again

    run.on_batch(change)


@fault(needs={"cp"}, component="data", axes={"cp"}, cause="mask_or_positions")
def positions_restart_on_every_cp_rank(run: FaultRun) -> None:
    """Rotary positions count from 0 on every slice of the sequence."""

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        positions = tensors["positions"]
        tensors["positions"] = torch.arange(positions.shape[1]).expand_as(positions).contiguous()

    run.on_batch(change)


@fault(needs={"cp"}, component="data", axes={"cp"}, cause="permuted_shards")
def slices_in_another_order_than_positions(run: FaultRun) -> None:
    """Each cp rank holds its neighbour's slice of the text, with its own positions."""
    import torch.distributed as dist

    group, size = run.mesh["cp"].get_group(), run.mesh["cp"].size()

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        for name in ("tokens", "labels"):
            pieces = [torch.empty_like(tensors[name]) for _ in range(size)]
            dist.all_gather(pieces, tensors[name], group=group)
            tensors[name] = pieces[(run.coordinate["cp"] + 1) % size]

    run.on_batch(change)


@fault(needs={"accumulation"}, component="data", cause="different_data")
def every_micro_batch_is_the_first(run: FaultRun) -> None:
    """The loader is asked once, and its rows go through as every micro-batch."""
    pieces = run.config.pipeline.num_microbatches

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        for name in ("tokens", "labels"):
            first = tensors[name].chunk(pieces)[0]
            tensors[name] = first.repeat(pieces, 1)

    run.on_batch(change)


@fault(needs={"dp_shard"}, component="data", axes={"dp_shard"}, cause="different_data")
def one_dp_rank_is_a_batch_behind(run: FaultRun) -> None:
    """One dp_shard rank's loader serves other rows than the sampler dealt to it."""
    if run.coordinate["dp_shard"] != 1:
        return

    def change(batch: LocalBatch) -> None:
        tensors = batch.tensors
        for name in ("tokens", "labels"):
            tensors[name] = tensors[name].flip(0).roll(1, 1).contiguous()

    run.on_batch(change)


@fault(needs={"steps"}, component="data", cause="different_data")
def the_first_batch_comes_again(run: FaultRun) -> None:
    """The loader is made anew in every step and serves the first batch each time."""
    seen: list[object] = []

    def repeat(batch: object) -> object:
        seen.append(batch)
        return seen[0]

    run.on_batch(repeat)
