"""Mixture of experts gone wrong: routing, dispatch, balance, and what experts' gradients are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.mesh import expert_mesh
from paralign.models.experts import NOT_HERE, Experts
from paralign.models.moe import MoE
from paralign.models.router import Router, named_routers, update_biases
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.forward import after_module
from paralign.prove.faults.pieces import local_gradients, only_some_partial_sums

Choices = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _routers(run: FaultRun) -> list[Router]:
    return list(named_routers(run.modules).values())


def _all(run: FaultRun, kind: type[nn.Module]) -> Iterator[Any]:
    for root in run.modules:
        yield from (module for module in root.modules() if isinstance(module, kind))


def _change_choices(run: FaultRun, change: Choices) -> None:
    """Change indices and weights ``[T, K]`` between every router and its experts."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, indices, weights = args
        return (x, *change(indices, weights))

    for stack in _all(run, Experts):
        stack.register_forward_pre_hook(enter)


def _local_experts(run: FaultRun) -> tuple[int, int]:
    """Return where this rank's experts begin and how many they are."""
    router = next(iter(_routers(run)), None)
    mesh = expert_mesh(run.mesh)["ep"]
    count = 0 if router is None else router.sizes.num_experts // mesh.size()
    return mesh.get_local_rank() * count, count


@fault(needs={"ep"}, component="forward", axes={"ep"}, cause="missing_reduction")
def experts_are_not_combined_over_ep(run: FaultRun) -> None:
    """Each rank returns what its own experts make of its tokens; nothing comes from the others."""
    first, count = _local_experts(run)

    def own(indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        is_here = (indices >= first) & (indices < first + count)
        return indices.where(is_here, NOT_HERE), weights

    _change_choices(run, own)


@fault(needs={"ep"}, component="forward", axes={"ep"}, cause="permuted_shards")
def tokens_are_dispatched_to_the_next_ep_rank(run: FaultRun) -> None:
    """Tokens meet the experts of the rank behind the one that has theirs."""
    _, count = _local_experts(run)
    total = count * expert_mesh(run.mesh)["ep"].size()
    _change_choices(run, lambda indices, weights: ((indices + count) % max(total, 1), weights))


@fault(needs={"experts"}, component="forward", cause="missing_contribution")
def one_expert_gets_no_tokens(run: FaultRun) -> None:
    """What is sent to the first expert is dropped, as if its buffer had no room."""
    _change_choices(run, lambda indices, weights: (indices.where(indices != 0, NOT_HERE), weights))


@fault(needs={"experts"}, component="forward", cause="missing_contribution")
def tokens_beyond_the_capacity_are_dropped(run: FaultRun) -> None:
    """An expert takes its even share of a micro-batch's tokens, and the later ones are lost."""
    routers = _routers(run)
    num_experts = routers[0].sizes.num_experts if routers else 1

    def drop(indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        capacity = max(indices.numel() // num_experts, 1)
        flat = indices.flatten()
        is_here = flat.unsqueeze(1) == torch.arange(num_experts)
        place = is_here.long().cumsum(0).gather(1, flat.unsqueeze(1)).squeeze(1)
        return flat.where(place <= capacity, NOT_HERE).view_as(indices), weights

    _change_choices(run, drop)


@fault(needs={"experts", "normalised"}, component="forward", cause="different_config")
def routing_weights_are_not_normalised(run: FaultRun) -> None:
    """Scores of the selected experts are taken as they are, though they do not add up to one."""

    def weigh(self: Router, selected: Tensor) -> Tensor:
        return selected * self.sizes.router_scaling

    run.patch(Router, "_weigh", weigh)


@fault(needs={"experts", "scaled_routing"}, component="forward", cause="constant_factor")
def routed_experts_are_scaled_twice(run: FaultRun) -> None:
    """The factor of routed experts is in their weights, and the layer multiplies by it again."""
    scaling = {router.sizes.router_scaling for router in _routers(run)} or {1.0}
    factor = scaling.pop()
    after_module(run, ".experts", lambda x: x * factor)


@fault(needs={"experts"}, component="forward", cause="different_config")
def routing_weights_are_applied_twice(run: FaultRun) -> None:
    """The dispatcher weighs what experts return, and the combination does so again."""
    _change_choices(run, lambda indices, weights: (indices, weights * weights))


@fault(needs={"experts"}, component="forward", cause="different_config")
def one_config_object_is_shared_by_two_models(run: FaultRun) -> None:
    """Another model that was built from the same config object has lowered its ``top_k``."""
    for router in _routers(run):
        run.patch(router, "sizes", replace(router.sizes, top_k=router.sizes.top_k - 1))


@fault(needs={"experts", "shared_expert"}, component="forward", cause="single_rank")
def the_shared_expert_is_missing_on_one_rank(run: FaultRun) -> None:
    """The first rank's layers with experts lack the one that every token passes."""
    if dist.get_rank() == 0 or not list(_all(run, MoE)):
        for layer in _all(run, MoE):
            # Times zero, so that FSDP finds a gradient for its weights as on the other ranks.
            layer.shared.register_forward_hook(lambda module, args, out: out * 0.0)


@fault(needs={"experts"}, component="forward", cause="precision")
def routers_compute_in_bfloat16(run: FaultRun) -> None:
    """Weights of the selected experts are computed in bfloat16."""
    right = Router._weigh

    def weigh(self: Router, selected: Tensor) -> Tensor:
        return right(self, selected.bfloat16().to(selected.dtype))

    run.patch(Router, "_weigh", weigh)


@fault(needs={"experts", "tp"}, component="reduction", axes={"tp"}, cause="missing_reduction")
def routers_are_not_summed_over_tp(run: FaultRun) -> None:
    """Routers see only a rank's part of the sequence, and their gradients stay that part's."""
    only_some_partial_sums(run, lambda name: ".router." not in name)


@fault(needs={"ep"}, component="reduction", axes={"ep"}, cause="constant_factor")
def expert_gradients_are_scaled_by_ep(run: FaultRun) -> None:
    """Experts saw the tokens of all ep ranks already, and their gradients are multiplied by ep."""
    degree = expert_mesh(run.mesh)["ep"].size()

    def scale() -> None:
        for _, grad in local_gradients(run, lambda name: ".experts." in name):
            grad.mul_(degree)

    run.after_backward(scale)


@fault(needs={"cp", "balance_loss"}, component="loss", axes={"cp"}, cause="missing_reduction")
def balance_loss_counts_the_own_slice_only(run: FaultRun) -> None:
    """How often experts are selected is counted in a rank's slice of the sequence, not in all."""
    for router in _routers(run):
        run.patch(router, "sum_over_sequence", lambda counts: counts)


@fault(needs={"balance_loss"}, component="loss", cause="different_config")
def the_balance_loss_is_off(run: FaultRun) -> None:
    """The coefficient of the balance loss was lost on the way to the routers."""
    for router in _routers(run):
        run.patch(router, "sizes", replace(router.sizes, balance_loss=0.0))


def _update(run: FaultRun, update: Callable[[], None]) -> None:
    run.patch(run.program, "update_routers", update)
    # A step notices that biases have not followed the optimizer; no other framework does.
    run.patch(run.program, "_check_routers_updated", lambda: None)


@fault(needs={"router_bias"}, component="state", cause="stale")
def router_biases_never_move(run: FaultRun) -> None:
    """The hook that balances experts was not registered for this model."""
    _update(run, lambda: None)


@fault(needs={"router_bias", "accumulation"}, component="state", cause="constant_factor")
def router_biases_move_once_a_micro_batch(run: FaultRun) -> None:
    """Every micro-batch of a step moves the biases, by the load of the whole step."""
    right = run.program.update_routers
    moves = run.config.pipeline.num_microbatches

    def update() -> None:
        routers = [router for router in _routers(run) if router.bias is not None]
        before = [router.bias.clone() for router in routers if router.bias is not None]
        right()
        for router, old in zip(routers, before, strict=True):
            assert router.bias is not None
            router.bias.add_((moves - 1) * (router.bias - old))

    _update(run, update)


@fault(
    needs={"router_bias", "dp_shard"},
    component="state",
    axes={"dp_shard"},
    cause="missing_reduction",
)
def router_biases_follow_the_own_rows(run: FaultRun) -> None:
    """Biases are balanced by the tokens of a rank's own rows, and differ from then on."""
    groups = [run.mesh[axis].get_group() for axis in ("cp", "tp")]

    def over_sequence(counts: Tensor) -> Tensor:
        for group in groups:
            dist.all_reduce(counts, group=group)
        return counts

    _update(run, lambda: update_biases(_routers(run), sum_over_tokens=over_sequence))


@fault(needs={"router_bias", "padding"}, component="state", cause="token_weighting")
def padding_is_counted_as_load(run: FaultRun) -> None:
    """Routers count the tokens of padding, which all go to the same few experts."""

    def count(router: nn.Module, args: tuple[Any, ...], routing: Any) -> None:
        assert isinstance(router, Router)
        if len(args) > 1 and args[1] is not None and router.tally.counts is not None:
            padding = routing.indices[~args[1].valid].flatten()
            router.tally.counts += padding.bincount(minlength=router.sizes.num_experts)

    for router in _routers(run):
        router.register_forward_hook(count)
