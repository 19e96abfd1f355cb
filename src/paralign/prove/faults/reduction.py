"""Gradients that are right on every rank and are put together wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import paralign.parallel.data
import paralign.program
import paralign.train.build
from paralign.config.run import RunConfig
from paralign.mesh import Axis, fold
from paralign.parallel.stage import Stage
from paralign.parallel.tied import sum_pair
from paralign.program import Program
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import local, local_gradients
from paralign.train.build import build_pieces

DATA_AXES = ("dp_replicate", "dp_shard", "cp")


def _shard_over(run: FaultRun, choose: Callable[[DeviceMesh], DeviceMesh]) -> None:
    """Let FSDP know another mesh than the one that holds all ranks with a share of the tokens."""
    run.patch(paralign.parallel.data, "fsdp_mesh", choose)
    run.rebuild()


@fault(needs={"cp"}, component="reduction", axes={"cp"}, cause="missing_reduction")
def cp_is_left_out_of_the_fsdp_mesh(run: FaultRun) -> None:
    """Parameters are sharded and reduced over dp alone: each cp rank keeps its slice's part."""

    def without_cp(mesh: DeviceMesh) -> DeviceMesh:
        if mesh["dp_replicate"].size() == 1:
            return mesh["dp_shard"]
        return mesh["dp_replicate", "dp_shard"]

    _shard_over(run, without_cp)


@fault(
    needs={"dp_replicate"}, component="reduction", axes={"dp_replicate"}, cause="missing_reduction"
)
def replicas_are_never_reduced(run: FaultRun) -> None:
    """Sharded inside each replica, but nothing sums gradients over dp_replicate."""
    _shard_over(run, lambda mesh: fold(mesh, Axis.FSDP))


@fault(needs={"dp_shard"}, component="reduction", axes={"dp_shard"}, cause="missing_reduction")
def data_parallel_hooks_never_fire(run: FaultRun) -> None:
    """The raw module is called, so that nothing sums gradients over dp_shard."""

    def without_dp_shard(mesh: DeviceMesh) -> DeviceMesh:
        return mesh["cp"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "cp"]

    _shard_over(run, without_dp_shard)


def _divide_by(run: FaultRun, factor: float) -> None:
    for module in run.modules:
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.set_gradient_divide_factor(factor)


@fault(needs={"cp"}, component="reduction", axes={"cp"}, cause="constant_factor")
def averaged_over_cp(run: FaultRun) -> None:
    """Gradients are averaged over cp ranks, which hold parts of one sum."""
    _divide_by(run, run.mesh["cp"].size())


@fault(needs={"dp_shard"}, component="reduction", axes={"dp_shard"}, cause="constant_factor")
def averaged_over_dp_shard(run: FaultRun) -> None:
    """Gradients are averaged over dp_shard although the loss is divided by all tokens."""
    _divide_by(run, run.mesh["dp_shard"].size())


@fault(
    needs={"dp_shard", "cp"},
    component="reduction",
    axes={"dp_shard", "cp"},
    cause="constant_factor",
)
def averaged_over_dp_shard_and_cp(run: FaultRun) -> None:
    """Gradients are averaged over the whole FSDP group."""
    _divide_by(run, run.mesh["dp_shard"].size() * run.mesh["cp"].size())


@fault(
    needs={"dp_replicate"}, component="reduction", axes={"dp_replicate"}, cause="constant_factor"
)
def averaged_over_replicas(run: FaultRun) -> None:
    """Gradients are summed inside each replica and averaged between them."""
    _divide_by(run, run.mesh["dp_replicate"].size())


@fault(
    needs={"dp_replicate"}, component="reduction", axes={"dp_replicate"}, cause="double_reduction"
)
def replicas_are_reduced_twice(run: FaultRun) -> None:
    """FSDP sums over dp_replicate, and the training loop does it again."""
    group = run.mesh["dp_replicate"].get_group()

    def again() -> None:
        for _, grad in local_gradients(run):
            dist.all_reduce(grad, group=group)

    run.after_backward(again)


def _reduce_ends_by_hand(run: FaultRun, reduce: Callable[[Tensor, FaultRun], None]) -> None:
    """Leave embedding, norm and head out of every FSDP unit; ``reduce`` sums their gradients.

    Needs ends that are not tied: whole, the two copies would start from different weights.
    They are plain parameters then, replicated over all data axes, as in the reports that this
    family is drawn from.
    """

    def without_ends(modules: Any, **settings: Any) -> Any:
        if isinstance(modules, Stage):
            names = ("embedding", "norm", "head")
            kept = {p for n, p in modules.named_parameters() if n.startswith(names)}
            settings["ignored_params"] = kept
        return fully_shard(modules, **settings)

    def build_real(config: RunConfig, dtype: torch.dtype) -> Any:
        model, blueprint = build_pieces(config, dtype)
        return model.to_empty(device="cpu"), blueprint  # whole weights are initialised then

    run.patch(paralign.parallel.data, "fully_shard", without_ends)
    run.patch(paralign.train.build, "build_pieces", build_real)
    # A step notices by itself that a unit was not reduced; no other framework does.
    run.patch(Program, "_reduction_problems", lambda program: [])
    run.rebuild()

    def reduce_ends() -> None:
        for parameter in run.parameters.values():
            if not hasattr(parameter, "placements") and parameter.grad is not None:
                reduce(parameter.grad, run)

    run.after_backward(reduce_ends)
    run.patch(run.program, "grad_norm", lambda: _norm_with_replicated_ends(run))


def _norm_with_replicated_ends(run: FaultRun) -> Tensor:
    """Count every element once: a plain gradient is on all ranks of a stage."""
    degrees = run.config.mesh.degrees
    total = torch.zeros((), dtype=torch.float64)
    aliases = run.program.tied_aliases
    for name, parameter in run.parameters.items():
        if parameter.grad is None or name in aliases:
            continue
        copies = degrees.dp_replicate
        if not hasattr(parameter, "placements"):
            copies *= degrees.dp_shard * degrees.cp
        total += local(parameter.grad).double().square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt()


def _sum_over(grad: Tensor, run: FaultRun, axes: tuple[str, ...]) -> None:
    for axis in axes:
        dist.all_reduce(grad, group=run.mesh[axis].get_group())


def _without(axis: str) -> tuple[str, ...]:
    return tuple(other for other in DATA_AXES if other != axis)


@fault(
    needs={"cp", "untied"},
    component="reduction",
    axes={"cp"},
    cause="missing_reduction",
)
def ends_are_not_summed_over_cp(run: FaultRun) -> None:
    """Embedding, last norm and head are reduced over dp and not over cp."""
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, _without("cp")))


@fault(
    needs={"dp_shard", "untied"},
    component="reduction",
    axes={"dp_shard"},
    cause="missing_reduction",
)
def ends_are_not_summed_over_dp_shard(run: FaultRun) -> None:
    """Embedding, last norm and head are not reduced over dp_shard."""
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, _without("dp_shard")))


@fault(
    needs={"dp_shard", "cp", "untied"},
    component="reduction",
    axes={"dp_shard", "cp"},
    cause="missing_reduction",
)
def ends_are_outside_every_unit(run: FaultRun) -> None:
    """Embedding, last norm and head are in no FSDP unit, and nothing reduces them."""
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, ("dp_replicate",)))


@fault(
    needs={"cp", "untied"},
    component="reduction",
    axes={"cp"},
    cause="constant_factor",
)
def ends_are_averaged_over_cp(run: FaultRun) -> None:
    """Plain parameters are averaged over cp where sharded ones are summed."""

    def reduce(grad: Tensor, run: FaultRun) -> None:
        _sum_over(grad, run, DATA_AXES)
        grad.div_(run.mesh["cp"].size())

    _reduce_ends_by_hand(run, reduce)


@fault(
    needs={"dp_replicate", "untied"},
    component="reduction",
    axes={"dp_replicate"},
    cause="constant_factor",
)
def ends_are_averaged_over_replicas(run: FaultRun) -> None:
    """Plain parameters are averaged over dp_replicate where sharded ones are summed."""

    def reduce(grad: Tensor, run: FaultRun) -> None:
        _sum_over(grad, run, DATA_AXES)
        grad.div_(run.mesh["dp_replicate"].size())

    _reduce_ends_by_hand(run, reduce)


@fault(
    needs={"cp", "untied"},
    component="reduction",
    axes={"cp"},
    cause="double_reduction",
)
def ends_are_summed_over_cp_twice(run: FaultRun) -> None:
    """The core sums gradients over cp already, and the loop does it once more for the ends."""
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, (*DATA_AXES, "cp")))


@fault(
    needs={"dp_shard", "cp", "untied"},
    component="reduction",
    axes={"cp"},
    cause="wrong_group",
)
def ends_use_the_dp_group_for_cp(run: FaultRun) -> None:
    """The sum over cp is handed the dp_shard group, which has summed already."""
    twice = ("dp_replicate", "dp_shard", "dp_shard")
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, twice))


@fault(
    needs={"dp_replicate", "dp_shard", "untied"},
    component="reduction",
    axes={"dp_replicate"},
    cause="wrong_group",
)
def ends_use_the_shard_group_for_replicas(run: FaultRun) -> None:
    """The sum over replicas is handed the dp_shard group, which has summed already."""
    twice = ("cp", "dp_shard", "dp_shard")
    _reduce_ends_by_hand(run, lambda grad, run: _sum_over(grad, run, twice))


@fault(
    needs={"dp_shard", "untied"},
    component="reduction",
    axes={"dp_shard"},
    cause="missing_contribution",
)
def the_last_dp_rank_adds_nothing(run: FaultRun) -> None:
    """The last dp_shard rank's bucket with the ends is not ready when it is reduced."""

    def reduce(grad: Tensor, run: FaultRun) -> None:
        if run.coordinate["dp_shard"] == run.mesh["dp_shard"].size() - 1:
            grad.zero_()
        _sum_over(grad, run, DATA_AXES)

    _reduce_ends_by_hand(run, reduce)


@fault(needs={"pp", "tied"}, component="reduction", axes={"pp"}, cause="missing_reduction")
def tied_copies_are_not_summed(run: FaultRun) -> None:
    """Embedding and head are one parameter on two stages, and each keeps its own gradient."""
    run.patch(paralign.program, "sum_pair", lambda *args: None)


@fault(needs={"pp", "tied"}, component="reduction", axes={"pp"}, cause="double_reduction")
def tied_copies_are_summed_twice(run: FaultRun) -> None:
    """The tied parameter's gradient is exchanged between its two stages two times."""

    def twice(*args: Any) -> None:
        sum_pair(*args)
        sum_pair(*args)

    run.patch(paralign.program, "sum_pair", twice)
