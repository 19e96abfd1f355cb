"""Activations that come out wrong, though inputs and weights are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paralign.models.decoder import DecoderBlueprint
from paralign.models.llama.blueprint import LlamaBlueprint
from paralign.parallel.context import ContextParallel
from paralign.parallel.context_forward import ContextForward
from paralign.parallel.stage import Stage
from paralign.program import Program
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun


def cores(run: FaultRun) -> Iterator[nn.Module]:
    """Yield this rank's attention cores."""
    for module in run.modules:
        for name, core in module.named_modules():
            if name.endswith("attention.core"):
                yield core


def stages(run: FaultRun) -> list[Stage]:
    """Return this rank's pipeline stages."""
    return [module for module in run.modules if isinstance(module, Stage)]


def after_module(run: FaultRun, end: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the output of every module whose name ends like this."""
    for module in run.modules:
        for name, inner in module.named_modules():
            if name.endswith(end):
                inner.register_forward_hook(lambda inner, args, output: change(output))


def between_stages(run: FaultRun, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Change what every stage but the first receives."""

    def receive(stage: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(stage, args[0]), *args[1:])

    for stage in stages(run):
        if not stage.is_first:
            stage.register_forward_pre_hook(receive)


@fault(needs={"cp", "ulysses"}, component="forward", axes={"cp"}, cause="wrong_axis")
def features_traded_for_heads(run: FaultRun) -> None:
    """The all-to-all splits the features of a head, which attention contracts, not the heads."""
    style = ContextParallel(seq_dim=2, head_dim=3, mask_kwarg_name="mask", guards=False)
    run.patch(DecoderBlueprint, "attention", lambda self: {"attention.core": style})
    run.rebuild()


@fault(needs={"cp"}, component="forward", axes={"cp"}, cause="mask_or_positions")
def attention_sees_its_own_slice_only(run: FaultRun) -> None:
    """The attention core was never patched: each rank attends inside its slice."""
    for core in cores(run):
        ContextParallel.remove(core)


@fault(needs={"cp", "gathered_kv"}, component="forward", axes={"cp"}, cause="mask_or_positions")
def causal_mask_starts_at_zero_on_every_rank(run: FaultRun) -> None:
    """Queries meet the keys of all ranks under a causal mask that has no offset."""
    attend = ContextForward._run_causal

    def shifted(self: Any, call: Any, q: Tensor, k: Tensor, v: Tensor, runs: Any) -> Tensor:
        first = runs[0][0]
        return attend(self, call, q, k, v, [(start - first, stop - first) for start, stop in runs])

    run.patch(ContextForward, "_run_causal", shifted)


@fault(needs={"cp"}, component="forward", axes={"cp"}, cause="mask_or_positions")
def rotary_tables_ignore_the_offset(run: FaultRun) -> None:
    """The model makes its rotary tables from the length of its slice, not from positions."""
    context = LlamaBlueprint.context

    def local_context(self: LlamaBlueprint, batch: Any, *, seq_len: int) -> Any:
        tokens = batch["tokens"]
        local = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return context(self, {**batch, "positions": local}, seq_len=seq_len)

    run.patch(LlamaBlueprint, "context", local_context)


@fault(needs={"cp"}, component="forward", axes={"cp"}, cause="permuted_shards")
def key_heads_meet_other_query_heads(run: FaultRun) -> None:
    """Grouped K/V heads are tiled instead of repeated, so that queries meet the wrong ones."""
    for core in cores(run):
        core.register_forward_pre_hook(lambda core, args: (args[0], *(x.flip(1) for x in args[1:])))


@fault(needs={"pp"}, component="forward", axes={"pp"}, cause="wrong_layer")
def a_stage_runs_its_layers_backwards(run: FaultRun) -> None:
    """The last pipeline rank runs the layers of a stage in the reverse order."""
    if run.coordinate["pp"] == run.mesh["pp"].size() - 1:
        for stage in stages(run):
            run.patch(stage, "_layer_names", stage.layer_names[::-1])


@fault(needs={"pp"}, component="forward", axes={"pp"}, cause="wrong_layer")
def a_layer_runs_on_both_sides_of_a_cut(run: FaultRun) -> None:
    """The split overlaps: the first stage's last layer runs twice."""
    for stage in stages(run):
        if stage.is_first:
            run.patch(stage, "_layer_names", [*stage.layer_names, stage.layer_names[-1]])


@fault(needs={"pp"}, component="forward", axes={"pp"}, cause="wrong_layer")
def a_layer_is_skipped_at_a_cut(run: FaultRun) -> None:
    """The split leaves a gap: the last stage's first layer never runs."""
    # A step notices by itself that parameters got no gradient; no other framework does.
    run.patch(Program, "_reduction_problems", lambda program: [])
    for stage in stages(run):
        if stage.is_last:
            run.patch(stage, "_layer_names", stage.layer_names[1:])


@fault(needs={"pp"}, component="forward", axes={"pp"}, cause="missing_contribution")
def the_tail_of_activations_is_lost(run: FaultRun) -> None:
    """What a stage receives ends in zeros: the buffer is used before all of it has come."""

    def lose(stage: nn.Module, x: Tensor) -> Tensor:
        keep = torch.ones_like(x)
        keep[..., x.shape[-1] // 2 :] = 0
        return x * keep

    between_stages(run, lose)


@fault(needs={"pp"}, component="forward", axes={"pp"}, cause="precision")
def activations_travel_in_bfloat16(run: FaultRun) -> None:
    """Stages send each other activations in bfloat16."""
    between_stages(run, lambda stage, x: x.bfloat16().to(x.dtype))


@fault(needs={"pp", "accumulation"}, component="forward", axes={"pp"}, cause="stale")
def a_receive_buffer_is_not_refreshed(run: FaultRun) -> None:
    """Each stage works on the activations of the micro-batch before."""
    before: dict[nn.Module, Tensor] = {}

    def reuse(stage: nn.Module, x: Tensor) -> Tensor:
        old = before.get(stage, x.detach())
        before[stage] = x.detach().clone()
        return x + (old - x).detach()

    between_stages(run, reuse)


@fault(component="forward", cause="single_rank")
def one_rank_adds_a_stray_constant(run: FaultRun) -> None:
    """A leftover of debugging adds 0.001 to an activation, on one rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        after_module(run, ".ffn", lambda x: x + 1e-3)


@fault(component="forward", cause="different_config")
def one_norm_has_another_epsilon(run: FaultRun) -> None:
    """One layer's norm was built with another eps."""
    for module in run.modules:
        for name, inner in module.named_modules():
            if name == "layers.1.ffn_norm":
                run.patch(inner, "eps", 1e-3)


@fault(component="forward", cause="precision")
def feed_forward_in_bfloat16(run: FaultRun) -> None:
    """An autocast region was left on around the feed-forward of every layer."""
    after_module(run, ".ffn", lambda x: x.bfloat16().to(x.dtype))


@fault(component="forward", cause="rng")
def dropout_is_on(run: FaultRun) -> None:
    """A dropout of a tenth is active on the feed-forward, with each rank's own generator."""
    torch.manual_seed(dist.get_rank())
    after_module(run, ".ffn", lambda x: F.dropout(x, 0.1))
