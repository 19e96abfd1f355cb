"""Notice, in a training loop that is not ours, when gradients are final and when a step has ended.

Three places are watched, only while recording: torch's clipping functions (they change gradients),
the entry of ``optimizer.step()`` and its end. Nothing is changed on the way through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paralign.align.sources.choose import norm_of_step
from paralign.align.sources.deepspeed import is_between_micro_batches

Undo = Callable[[], None]

# Functions that a clipping step goes through, and whether the norm it clips by is their result or
# their argument. All are looked up by torch itself in these modules, so a function that the user
# imported by its name is seen too, through the ones it calls.
_TOTAL_NORM_FUNCTIONS = ("get_total_norm", "_get_total_norm")
_CLIP_FUNCTIONS = ("clip_grads_with_norm_", "_clip_grads_with_norm_")
# Before torch 2.6 clip_grad_norm_ is one piece, and this is the first thing it calls.
_OLD_FIRST_CALL = "_group_tensors_by_device_and_dtype"


class StepWatch:
    """Call back at the moments a recorder needs.

    Args:
        parameters: The parameters that are recorded; optimizers and clipping of others are ignored.
        optimizers: The optimizers to watch; None watches every torch optimizer that holds one of
            the parameters.
        on_gradients: Called before anything uses or changes gradients, maybe several times a step,
            with the ids of the parameters they belong to (None: not known).
        on_norm: Called with the norm that the gradients are clipped by.
        on_step_begin: Called with the optimizer at the entry of its ``step()``.
        on_step_end: Called with the optimizer when its ``step()`` has returned.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizers: Sequence[Any] | None,
        *,
        on_gradients: Callable[[set[int] | None], None],
        on_norm: Callable[[Any], None],
        on_step_begin: Callable[[Any], None],
        on_step_end: Callable[[Any], None],
    ) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._optimizers = optimizers
        self._on_gradients = on_gradients
        self._on_norm = on_norm
        self._on_step_begin = on_step_begin
        self._on_step_end = on_step_end
        self._undo: list[Undo] = []
        self._active = False
        self._depth = 0

    def start(self) -> None:
        """Begin to watch."""
        self._active = True
        self._watch_clipping()
        if self._optimizers is None:
            self._watch_all_optimizers()
        else:
            for optimizer in self._optimizers:
                self._watch_optimizer(optimizer)

    def stop(self) -> None:
        """Put everything back as it was."""
        self._active = False
        while self._undo:
            self._undo.pop()()

    def _watch_all_optimizers(self) -> None:
        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._holds_ours(optimizer):
                self._begin(optimizer)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._holds_ours(optimizer):
                self._end(optimizer)

        self._undo.append(register_optimizer_step_pre_hook(before).remove)
        self._undo.append(register_optimizer_step_post_hook(after).remove)

    def _watch_optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            pre = optimizer.register_step_pre_hook(lambda opt, args, kwargs: self._begin(opt))
            post = optimizer.register_step_post_hook(lambda opt, args, kwargs: self._end(opt))
            self._undo += [pre.remove, post.remove]
            return
        step = optimizer.step

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_between_micro_batches(optimizer):
                return step(*args, **kwargs)
            self._begin(optimizer)
            result = step(*args, **kwargs)
            norm = norm_of_step(optimizer, result) if self._active else None
            if norm is not None:
                self._on_norm(norm)
            self._end(optimizer)
            return result

        self._replace(optimizer, "step", watched)

    def _begin(self, optimizer: Any) -> None:
        if self._active:
            self._on_step_begin(optimizer)

    def _end(self, optimizer: Any) -> None:
        if self._active:
            self._on_step_end(optimizer)

    def _watch_clipping(self) -> None:
        module = torch.nn.utils.clip_grad
        names = ["clip_grad_norm_", *_TOTAL_NORM_FUNCTIONS, *_CLIP_FUNCTIONS]
        if not hasattr(module, "_get_total_norm"):
            names.append(_OLD_FIRST_CALL)
        for name in names:
            for place in (module, torch.nn.utils):
                if hasattr(place, name):
                    self._replace(place, name, self._seen(name, getattr(place, name)))

    def _seen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], torch.Tensor):
                args = (list(args[0]), *args[1:])  # it may be a generator, and is looked at twice
            concerned = self._concerned(args, kwargs) if self._active else set()
            if concerned is not None and not concerned:
                return function(*args, **kwargs)
            self._on_gradients(concerned)
            outermost = self._depth == 0
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
            # clip_grad_norm_ calls the others; its result is noted once, by the outermost.
            if outermost and name == "clip_grad_norm_":
                self._on_norm(result)
            elif outermost and name in _CLIP_FUNCTIONS:
                self._on_norm(kwargs["total_norm"] if "total_norm" in kwargs else args[2])
            return result

        return seen

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        missing = object()
        old = vars(owner).get(name, missing)
        setattr(owner, name, new)

        def undo() -> None:
            # Somebody may have replaced it again; then ours stays inside theirs and is inactive.
            if vars(owner).get(name) is not new:
                return
            if old is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._undo.append(undo)

    def _concerned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int] | None:
        """Return the ids of our parameters that a clipping call is given, or whose gradients."""
        given = args[0] if args else kwargs.get("parameters", kwargs.get("tensors"))
        if not isinstance(given, list | torch.Tensor):
            return None  # a generator by keyword, which must not be used up
        flat = [given] if isinstance(given, torch.Tensor) else given
        if flat and isinstance(flat[0], list):
            flat = flat[0]  # _OLD_FIRST_CALL takes a list of lists
        tensors = {id(tensor) for tensor in flat}
        return {id(p) for p in self._parameters if id(p) in tensors or id(p.grad) in tensors}

    def _holds_ours(self, optimizer: Any) -> bool:
        return any(
            id(parameter) in self._ids
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
