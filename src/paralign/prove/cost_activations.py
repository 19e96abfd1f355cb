"""What the backward pass keeps of the forward pass; counted on the meta device, not measured.

One micro-batch of every stage is run on the meta device, and the storages that autograd saves are
added up, each once. How many micro-batches of a stage wait for their backward pass at one time is a
property of the schedule. Where tensor parallelism cuts the stream, a rank's tokens with all
features stand for all tokens with a rank's features, which are as many numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paralign.blueprint import Blueprint
from paralign.config.model_choice import choose_model
from paralign.config.run import RunConfig
from paralign.dropout import name_dropouts
from paralign.loss import token_cross_entropy_sum
from paralign.parallel.context import ContextParallel
from paralign.parallel.context_rules import inner_degree, kv_repeats
from paralign.parallel.recompute import callables_of
from paralign.parallel.stage import meta_copy
from paralign.parallel.stages import Placement
from paralign.parallel.support import Plan
from paralign.parallel.tensor import styles_of
from paralign.planning import expert_stacks
from paralign.train.build import build_tensor

# What experts keep of a row that one of them computes: gate, up, silu and product of the expert's
# width; input and output of the token's. Less of them where methods are computed again.
INNER, OUTER = 4, 2
INNER_AGAIN, OUTER_AGAIN = {"activate": 2}, {"permute": 1}


def waiting(plan: Plan, pp_rank: int, stages: Sequence[int]) -> dict[int, int]:
    """Return how many micro-batches of each stage a rank keeps at one time, at most.

    Args:
        plan: The resolved plan.
        pp_rank: The pipeline rank.
        stages: Its stages, in model order.
    """
    m, pp, kind = plan.num_microbatches, plan.pp, plan.kind
    if kind.name in ("GPipe", "LoopedBFS"):
        return dict.fromkeys(stages, m)
    if kind.placement is Placement.SINGLE:
        return dict.fromkeys(stages, min(m, pp - pp_rank))
    if kind.placement is Placement.V:
        # As much as two stages of 1F1B's first rank; DualPipeV has one more on its way.
        return dict.fromkeys(stages, min(m, pp + (kind.name == "DualPipeV")))
    # Interleaved: rounds of as many micro-batches for one stage, then for the next.
    size = m // max(1, m // pp)
    forwards = min(m * len(stages), (len(stages) - 1) * size + 2 * (pp - 1 - pp_rank) + 1)
    counts = dict.fromkeys(stages, 0)
    for number in range(forwards):
        counts[stages[number // size % len(stages)]] += 1
    return counts


def stage_activations(
    model: nn.Module,
    blueprint: Blueprint,
    *,
    config: RunConfig,
    plan: Plan,
    splits: Sequence[range],
) -> list[tuple[int, int]]:
    """Return for every stage the bytes that one micro-batch keeps, and those it needs on the way.

    The latter are held for one layer, or one chunk of the loss, at a time: what is computed again.

    Args:
        model: The whole model on the meta device.
        blueprint: How it is cut.
        config: The run.
        plan: The resolved plan.
        splits: Layers of every stage.
    """
    degrees = config.mesh.degrees
    skeleton = meta_copy(name_dropouts(model), getattr(torch, plan.compute_dtype))
    parts = degrees.tp if build_tensor(config).sequence_parallel else 1
    rows = config.batch.global_batch // degrees.dp // plan.num_microbatches
    seq_len = config.batch.seq_len // degrees.cp // parts
    tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "positions": tokens, "labels": tokens, "draws": tokens}
    context = blueprint.context(batch, seq_len=seq_len)
    ledger = Ledger([*skeleton.parameters(), *skeleton.buffers()])
    names = [f"{blueprint.layers_name}.{index}" for split in splits for index in split]
    _Watch(skeleton, blueprint, config, ledger).attach(names)
    found: list[tuple[int, int]] = []
    x = tokens
    for number, split in enumerate(splits):
        ledger.begin()
        again = 0
        with ledger.counting():
            x = _like(x) if number else blueprint.prologue(skeleton, batch, context)
            for index in split:
                layer = skeleton.get_submodule(f"{blueprint.layers_name}.{index}")
                ledger.hold(x)
                before = ledger.state
                x = blueprint.layer(layer, x, context)
                if config.recompute.parts == "block":
                    again = max(again, ledger.num_bytes - before[0])
                    ledger.state = before
            if number == len(splits) - 1:
                logits = blueprint.epilogue(skeleton, x, context)
                if plan.loss_chunks == 1:
                    token_cross_entropy_sum(logits, batch["labels"])
                else:  # logits of a chunk and their gradient
                    again += 2 * logits.nbytes // plan.loss_chunks
        found.append((ledger.num_bytes, again))
    return found


class Ledger:
    """Adds up the storages that autograd saves, each once.

    Args:
        known: Tensors that are not to be counted: parameters and buffers.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        # A storage is known by its address, which is its own only while it lives.
        self._known = {_address(tensor): tensor for tensor in known}
        self._held: dict[int, Any] = {}
        self._is_open = True
        self.num_bytes = 0
        self.share = 1  # what is added now is divided by this

    @property
    def state(self) -> tuple[int, dict[int, Any]]:
        """What was added so far."""
        return self.num_bytes, dict(self._held)

    @state.setter
    def state(self, state: tuple[int, dict[int, Any]]) -> None:
        self.num_bytes, self._held = state

    def begin(self) -> None:
        """Forget what was added."""
        self.state = (0, {})

    def add(self, num_bytes: int) -> None:
        """Add bytes of which there is no tensor."""
        if self._is_open:
            self.num_bytes += num_bytes // self.share

    def hold(self, *tensors: Tensor) -> None:
        """Add the storages of ``tensors`` that are not there already."""
        for tensor in tensors:
            address = _address(tensor)
            if self._is_open and address not in self._known and address not in self._held:
                self._held[address] = tensor
                self.add(tensor.untyped_storage().nbytes())

    def skip(self, *tensors: Tensor) -> None:
        """Never add the storages of ``tensors``: they are computed again."""
        self._known.update((_address(tensor), tensor) for tensor in tensors)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what autograd saves inside."""

        def pack(tensor: Tensor) -> Tensor:
            self.hold(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Add nothing inside."""
        was_open, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was_open


class _Watch:
    """Tells the ledger what the skeleton on the meta device does not show by itself."""

    def __init__(
        self, skeleton: nn.Module, blueprint: Blueprint, config: RunConfig, ledger: Ledger
    ) -> None:
        self._skeleton = skeleton
        self._blueprint = blueprint
        self._config = config
        self._ledger = ledger
        self._options = build_tensor(config)
        self._width = choose_model(config.model).size("expert_hidden_size") or 0

    def attach(self, layers: Sequence[str]) -> None:
        """Watch attention cores, experts, ways into tensor parallelism, and recomputed parts."""
        for name in layers:
            layer = self._skeleton.get_submodule(name)
            for stack in expert_stacks(self._skeleton, self._blueprint, [name]):
                experts = self._skeleton.get_submodule(stack)
                again = self._again(stack.removeprefix(f"{name}."))
                _wrap(experts, "forward", self._experts(experts.forward, again))
            for core, style in self._blueprint.attention().items():
                module = layer.get_submodule(core)
                _wrap(module, "forward", self._core(style, module))
            self._parts(layer)
        if self._config.mesh.tp > 1:
            plan = self._blueprint.tensor_parallel()
            for name, way in styles_of(self._skeleton, plan, self._options):
                if way.crossing == "enter":
                    module = self._skeleton.get_submodule(name)
                    module.register_forward_pre_hook(self._enter)
                    module.register_forward_hook(self._leave)

    def _core(self, style: ContextParallel, module: nn.Module) -> Callable[..., Any]:
        """An attention kernel keeps q, k, v, the output and a number a row, and no scores."""
        signature, forward = style.signature_of(module), module.forward
        cp, tp = self._config.mesh.cp, self._config.mesh.tp
        inner = inner_degree(cp, self._config.context.ulysses_degree)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._ledger.closed():
                out = forward(*args, **kwargs)
            q, k, v = signature.read(args, kwargs).qkv
            self._ledger.hold(q, k, v, out)
            self._ledger.add(4 * math.prod(q.shape[:-1]))
            [row_dim] = {0, 1, 2} - {style.seq_dim, style.head_dim}
            self._ledger.add(self._mask_bytes(q.shape[row_dim], q.element_size()))
            heads = max(1, k.shape[style.head_dim] // tp)
            more = kv_repeats(heads, inner) * (cp // inner) - 1
            self._ledger.add(more * (k.nbytes + v.nbytes))
            return out

        return call

    def _mask_bytes(self, rows: int, element_size: int) -> int:
        """A kernel keeps a mask of whole rows as numbers of its own, in every layer."""
        is_masked = self._config.data.packing == "isolated"
        return rows * self._config.batch.seq_len**2 * element_size if is_masked else 0

    def _again(self, stack: str) -> set[str]:
        """Which methods of a stack of experts, by its name in the layer, are computed again."""
        parts = self._config.recompute.parts
        methods = (*INNER_AGAIN, *OUTER_AGAIN)
        return {method for method in methods if _is_part(f"{stack}.{method}", parts)}

    def _experts(self, forward: Callable[..., Any], again: set[str]) -> Callable[..., Any]:
        """Even load: how many rows a rank gets depends on the router."""
        inner = INNER - sum(INNER_AGAIN.get(method, 0) for method in again)
        outer = OUTER - sum(OUTER_AGAIN.get(method, 0) for method in again)

        def call(x: Tensor, indices: Tensor, *rest: Any) -> Any:
            values = indices.numel() * (inner * self._width + outer * x.shape[-1])
            apart = self._options.sequence_parallel or self._ledger.share > 1
            self._ledger.add(values * x.element_size() // (1 if apart else self._config.mesh.tp))
            return forward(x, indices, *rest)

        return call

    def _enter(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self._options.sequence_parallel:  # the gathered input is kept in place of a part
            self._ledger.add((self._config.mesh.tp - 1) * args[0].nbytes)
        else:
            self._ledger.hold(args[0])
            self._ledger.share = self._config.mesh.tp

    def _leave(self, *_: Any) -> None:
        self._ledger.share = 1

    def _parts(self, layer: nn.Module) -> None:
        parts = self._config.recompute.parts
        for name in list(callables_of(layer)) if not isinstance(parts, str) else ():
            if _is_part(name, parts):
                owner, _, leaf = name.rpartition(".")
                module = layer.get_submodule(owner)
                if isinstance(getattr(module, leaf), nn.Module):
                    module, leaf = getattr(module, leaf), "forward"
                _wrap(module, leaf, self._part(getattr(module, leaf)))

    def _part(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any, **kwargs: Any) -> Any:
            self._ledger.hold(*_tensors(args), *_tensors(kwargs.values()))
            with self._ledger.closed():
                out = call(*args, **kwargs)
            self._ledger.skip(*_tensors([out]))
            return out

        return again


def _is_part(name: str, parts: str | Sequence[str]) -> bool:
    return not isinstance(parts, str) and any(fnmatchcase(name, part) for part in parts)


def _wrap(module: nn.Module, attribute: str, call: Callable[..., Any]) -> None:
    setattr(module, attribute, call)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        items = value if isinstance(value, tuple) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, requires_grad=True)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
