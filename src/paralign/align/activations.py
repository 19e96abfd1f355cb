"""Notice what modules return, and the gradients of that, in a training loop that is not ours.

Hooks on the modules give outputs in forward order; hooks on the returned tensors give their
gradients in backward order. A forward is counted once: not when activation checkpointing repeats
it, not when torch's pipelining runs it to find shapes, not without gradients (validation).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align.module_names import NamedModule
from paralign.align.tensor_entry import Kind

_INFERENCE = ("_forward_metadata_inference", "_shape_inference")
"""Functions of torch's pipelining, of new and old versions, that run a stage to find its shapes."""


@dataclass(frozen=True)
class Seen:
    """A tensor that passed: what it is, and when."""

    kind: str
    name: str
    micro_batch: int
    call: int
    tensor: Tensor


@dataclass
class _Root:
    """One model or pipeline stage: how far its forwards and backwards have come in this step."""

    modules: Sequence[NamedModule]
    micro_batch: int = -1
    counts: bool = True
    """Whether the forward in progress is one of training."""
    is_called: bool = False
    """Whether the loop calls the root itself, or only its parts."""
    first: str | None = None
    """The part that was called first in this micro-batch."""
    calls: dict[str, int] = field(default_factory=dict)
    backward_micro_batch: int | None = None
    """The micro-batch whose gradients came last."""
    total_calls: dict[tuple[int, str], int] = field(default_factory=dict)
    without_grad: set[tuple[int, str]] = field(default_factory=set)
    """Outputs inside a reentrant checkpoint: their gradients exist only when it is repeated."""
    repeated: set[tuple[int, str]] = field(default_factory=set)


class ActivationWatch:
    """Call back with inputs, outputs and output gradients as they pass.

    Args:
        roots: Per model or pipeline stage the module that is called, and the parts to watch.
        outputs: Whether to report what the parts return.
        output_grads: Whether to report the gradients of that.
        on_call: Called at the beginning of a micro-batch, and for every part called in it, with the
            number of the micro-batch, the module and its arguments; sees the inputs.
        on_tensor: Called with every tensor.
        on_unseen: Called with a name and why its tensors could not be seen.
    """

    def __init__(
        self,
        roots: Sequence[tuple[nn.Module, Sequence[NamedModule]]],
        *,
        outputs: bool,
        output_grads: bool,
        on_call: Callable[[int, nn.Module, tuple[Any, ...], Mapping[str, Any]], None],
        on_tensor: Callable[[Seen], None],
        on_unseen: Callable[[str, str], None],
    ) -> None:
        self._given = [(module, _Root(parts)) for module, parts in roots]
        self._outputs = outputs
        self._output_grads = output_grads
        self._on_call = on_call
        self._on_tensor = on_tensor
        self._on_unseen = on_unseen
        self._reported: set[tuple[str, int, int]] = set()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to watch."""
        for module, root in self._given:
            hook = partial(self._enter, root)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._leave, root)))
            for part in root.modules:
                if part.module is not module:
                    pre = partial(self._call, root, part)
                    self._handles.append(
                        part.module.register_forward_pre_hook(pre, with_kwargs=True)
                    )
                if self._outputs or self._output_grads:
                    post = partial(self._returned, root, part.name)
                    self._handles.append(part.module.register_forward_hook(post))
                if part.hides and (self._outputs or self._output_grads):
                    self._on_unseen(f"{part.name}.*", "it is compiled, so its parts are not seen")

    def stop(self) -> None:
        """Remove every hook. Hooks on tensors go with their tensors and report nothing more."""
        while self._handles:
            self._handles.pop().remove()

    def new_step(self) -> None:
        """Begin to count micro-batches anew."""
        self._reported.clear()
        for module, root in self._given:
            del module
            root.micro_batch, root.backward_micro_batch = -1, None
            root.calls, root.total_calls, root.first = {}, {}, None
            root.without_grad, root.repeated = set(), set()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this step so far."""
        return max((root.micro_batch + 1 for _, root in self._given), default=0)

    def _enter(
        self, root: _Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if _is_repeated():
            return
        root.is_called = True
        root.counts = torch.is_grad_enabled() and not _finds_shapes()
        if root.counts:
            self._begin(root)
            self._on_call(root.micro_batch, module, args, kwargs)

    def _leave(self, root: _Root, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the end of the root, so that its backward tells which micro-batch's it is."""
        if _is_repeated() or not root.counts or not self._output_grads:
            return
        for _, tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._comes_back, root, root.micro_batch))

    def _comes_back(self, root: _Root, micro_batch: int, grad: Tensor) -> None:
        root.backward_micro_batch = micro_batch

    def _begin(self, root: _Root) -> None:
        root.micro_batch += 1
        root.calls, root.first = {}, None

    def _call(
        self,
        root: _Root,
        part: NamedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if _is_repeated():
            return
        if not root.is_called:
            # The loop calls the parts by itself: the first one called again begins a micro-batch.
            root.counts = torch.is_grad_enabled() or root.first not in (None, part.name)
            if root.counts and root.first in (None, part.name):
                self._begin(root)
                root.first = part.name
        if root.counts:
            self._on_call(root.micro_batch, module, args, kwargs)

    def _returned(self, root: _Root, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_repeated():
            if self._output_grads and torch.is_grad_enabled():
                self._returned_again(root, name, output)
            return
        if not root.counts or root.micro_batch < 0:
            return
        micro_batch, call = root.micro_batch, root.calls.get(name, 0)
        root.calls[name] = call + 1
        root.total_calls[micro_batch, name] = call + 1
        for place, tensor in tensors_of(output):
            if self._outputs:
                self._on_tensor(Seen(Kind.OUTPUT, name + place, micro_batch, call, tensor))
            if not self._output_grads:
                continue
            if tensor.requires_grad:
                self._await_gradient(root, name + place, micro_batch, call, tensor)
            elif tensor.is_floating_point():
                root.without_grad.add((micro_batch, name + place))

    def _returned_again(self, root: _Root, name: str, output: Any) -> None:
        """Take the gradients that a reentrant checkpoint has only when it is repeated."""
        micro_batch = root.backward_micro_batch
        if micro_batch is None:
            micro_batch = root.micro_batch  # nothing behind it has told, as in a plain loop
        for place, tensor in tensors_of(output):
            key = micro_batch, name + place
            if key not in root.without_grad or not tensor.requires_grad or key in root.repeated:
                continue
            if root.total_calls.get((micro_batch, name), 0) != 1:
                self._on_unseen(
                    name,
                    "it is called several times inside a reentrant checkpoint, which does "
                    "not tell whose gradient comes back",
                )
                continue
            root.repeated.add(key)
            self._await_gradient(root, name + place, micro_batch, 0, tensor)

    def _await_gradient(
        self, root: _Root, name: str, micro_batch: int, call: int, tensor: Tensor
    ) -> None:
        def arrived(grad: Tensor) -> None:
            root.backward_micro_batch = micro_batch
            key = name, micro_batch, call
            # A split backward pass (zero bubble) comes by twice; the first time it is complete.
            if self._handles and key not in self._reported:
                self._reported.add(key)
                self._on_tensor(Seen(Kind.OUTPUT_GRAD, name, micro_batch, call, grad))

        tensor.register_hook(arrived)


def tensors_of(output: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module returned, each with its place: ``[1]``, ``[key]``."""
    if isinstance(output, Tensor):
        yield place, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from tensors_of(value, f"{place}[{key}]")
    elif isinstance(output, list | tuple):
        for number, value in enumerate(output):
            yield from tensors_of(value, f"{place}[{number}]")


def _is_repeated() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing repeats it."""
    return bool(torch._C._current_graph_task_id() != -1)


def _finds_shapes() -> bool:
    """Whether torch's pipelining is running a stage to find its shapes, not to train."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _INFERENCE:
            return True
        frame = frame.f_back
    return False
