"""Notice what each micro-batch adds to the gradients, before it is added up or reduced.

A hook on the tensor that a module computes with sees exactly that: under DDP it runs before the
reduction; under FSDP it must sit on the gathered tensor, which exists while the module runs. What
arrives in one backward pass is one micro-batch's, however often it arrives: a parameter used in
several reentrant checkpoints gets its gradient in parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align.names import NamedParameter
from paralign.align.placements import is_dtensor

_BACKWARDS = ("backward", "grad")


class MicroGradients:
    """Call back with the gradients of one micro-batch at the end of its backward pass.

    Args:
        parameters: What to watch.
        on_gradients: Called with the number of the micro-batch and the gradients: of every
            parameter, by its place in ``parameters``, as the module's computation gave it.
        modules: What holds the parameters; a module may compute with the weight of a part of it,
            without calling that part.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        on_gradients: Callable[[int, dict[int, Tensor]], None],
        *,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self._parameters = parameters
        self._parents = {
            child: module
            for root in modules
            for module in root.modules()
            for child in module.children()
        }
        self._on_gradients = on_gradients
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        # Leaves with a hook; the tensor is kept so that no other one can get the same id.
        self._hooked: dict[tuple[int, int], Tensor] = {}
        self._arrived: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def start(self) -> None:
        """Begin to watch."""
        by_owner: dict[nn.Module, dict[str, list[int]]] = {}
        for number, named in enumerate(self._parameters):
            attribute = named.source.rpartition(".")[2]
            by_owner.setdefault(named.owner, {}).setdefault(attribute, []).append(number)
            if named.flat is None and not is_dtensor(named.parameter):
                self._watch_tensor(named.parameter, [number])
        for owner, attributes in by_owner.items():
            hook = partial(self._before_forward, attributes)
            self._handles.append(owner.register_forward_pre_hook(hook))
            if (parent := self._parents.get(owner)) is not None:
                hook = partial(self._before_parent, owner, attributes)
                self._handles.append(parent.register_forward_pre_hook(hook))
        for name in _BACKWARDS:
            self._replace(name)

    def stop(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()
        while self._undo:
            self._undo.pop()()
        self._hooked.clear()

    def new_step(self) -> list[int]:
        """Begin to count anew; return the places of parameters that got no gradient."""
        silent = [n for n in range(len(self._parameters)) if not self._counts.get(n)]
        self._counts.clear()
        self._arrived.clear()
        return silent

    def _before_forward(
        self, attributes: dict[str, list[int]], module: nn.Module, args: tuple[Any, ...]
    ) -> None:
        """Watch the tensors that a module is about to compute with: gathered ones, under FSDP."""
        for attribute, numbers in attributes.items():
            tensor = getattr(module, attribute, None)
            if isinstance(tensor, Tensor):
                self._watch_tensor(tensor, numbers)

    def _before_parent(
        self,
        owner: nn.Module,
        attributes: dict[str, list[int]],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> None:
        for attribute, numbers in attributes.items():
            tensor = getattr(owner, attribute, None)
            # Others are views, made anew in every forward, or left from the last one.
            if isinstance(tensor, nn.Parameter) and tensor.is_leaf:
                self._watch_tensor(tensor, numbers)

    def _watch_tensor(self, tensor: Tensor, numbers: list[int]) -> None:
        if not tensor.requires_grad:
            return
        if tensor.is_leaf:
            numbers = [n for n in numbers if (id(tensor), n) not in self._hooked]
            self._hooked.update({(id(tensor), n): tensor for n in numbers})
        else:
            # A view of FSDP1's flat tensor, another one in every forward; or one of a leaf that has
            # a hook already, and then the same gradient would arrive twice.
            leaf = _leaf_behind(tensor)
            numbers = [n for n in numbers if (id(leaf), n) not in self._hooked]
        if numbers:
            self._handles.append(tensor.register_hook(partial(self._arrives, numbers)))

    def _arrives(self, numbers: list[int], gradient: Tensor | None) -> None:
        if gradient is None:  # a function that gives its input no gradient
            return
        for number in numbers:
            before = self._arrived.get(number)
            value = gradient.detach()
            # Copied: what reduces it may work in place.
            self._arrived[number] = value.clone() if before is None else before + value

    def _backward_ends(self) -> None:
        by_micro_batch: dict[int, dict[int, Tensor]] = {}
        for number, gradient in self._arrived.items():
            count = self._counts.get(number, 0)
            self._counts[number] = count + 1
            by_micro_batch.setdefault(count, {})[number] = gradient
        self._arrived = {}
        for micro_batch, gradients in sorted(by_micro_batch.items()):
            self._on_gradients(micro_batch, gradients)

    def _replace(self, name: str) -> None:
        """Notice the end of the outermost call of a function of ``torch.autograd``."""
        original = getattr(torch.autograd, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = torch._C._current_graph_task_id() == -1
            result = original(*args, **kwargs)
            if outermost:
                self._backward_ends()
            return result

        setattr(torch.autograd, name, watched)

        def undo() -> None:
            # Somebody may have replaced it again; then ours stays inside theirs and sees nothing.
            if getattr(torch.autograd, name) is watched:
                setattr(torch.autograd, name, original)

        self._undo.append(undo)


def _leaf_behind(view: Tensor) -> Tensor | None:
    """Return the leaf that a tensor is a view or a copy of; None: more than one went into it."""
    node = view.grad_fn
    while node is not None and not hasattr(node, "variable"):
        inputs = [behind for behind, _ in node.next_functions if behind is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return None if node is None else node.variable
