"""Activation recomputation: forget what was computed in the forward pass, compute it again later.

A whole layer keeps only its input. A *part* of a layer, a module or a method, keeps its inputs:
what it saves inside and what it returns are computed again, once, when the backward pass first
needs either. Other modules that saved the part's output for their own backward pass hold a promise
instead::

    forward    x -> norm -> y -> linear           kept: x; linear saved a promise of y, not y
    backward   linear needs y: norm runs again on x, and serves linear and its own backward pass

Results are the same to the last bit, because the same operations run on the same values.

Ref:
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    https://arxiv.org/abs/1604.06174
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (only
    parts that are large and cheap). https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from paralign.errors import LayoutError

WORDS = ("none", "block")


@dataclass(frozen=True)
class Recompute:
    """What is computed again in the backward pass.

    Attributes:
        parts: ``"none"``; ``"block"``: every layer as a whole; or names of modules and methods
            inside a layer, ``*`` for any text: ``("*_norm", "attention.project")``.
    """

    parts: str | Sequence[str] = "none"


def recompute_problems(layers: Iterable[nn.Module], recompute: Recompute) -> list[str]:
    """Return why ``recompute`` cannot be applied to ``layers``, one sentence each.

    Args:
        layers: All layers of the model, on any device.
        recompute: What to compute again.
    """
    if isinstance(recompute.parts, str):
        known = " or ".join(repr(word) for word in WORDS)
        fix = f"Use {known}, or a list of names."
        given = recompute.parts
        return [] if given in WORDS else [f"recompute parts={given!r} is not known. {fix}"]
    names = list(dict.fromkeys(name for layer in layers for name in callables_of(layer)))
    problems = []
    for pattern in recompute.parts:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            problems.append(
                f"recompute part {pattern!r} matches no module or method of a layer.{hint}"
            )
    return problems


def apply_recompute(layer: nn.Module, recompute: Recompute) -> nn.Module:
    """Let ``layer`` recompute what it is told to, in place, and return it.

    Comm:
        None of its own; collectives inside what is recomputed run again in the backward pass.

    Args:
        layer: One layer; what it does not have of the listed parts is left to other layers.
        recompute: What to compute again.
    """
    if recompute.parts == "none":
        return layer
    if recompute.parts == "block":
        _replace(layer, "forward", _Block(layer.forward))
        return layer
    scope = _Scope()
    for name in callables_of(layer):
        if any(fnmatchcase(name, pattern) for pattern in recompute.parts):
            owner, attribute = _find(layer, name)
            _replace(owner, attribute, _Part(name, getattr(owner, attribute), scope))
            scope.waiting.add(name)
    _replace(layer, "forward", _Layer(layer.forward, scope))
    return layer


def callables_of(layer: nn.Module) -> Iterator[str]:
    """Yield the names of what can be a part of ``layer``: its modules and their public methods."""
    for name, module in layer.named_modules():
        prefix = f"{name}." if name else ""
        if name and type(module).forward is not nn.Module.forward:
            yield name
        for kind in type(module).__mro__:
            if kind is nn.Module or kind.__module__.startswith("torch."):
                break
            for leaf, value in vars(kind).items():
                if not leaf.startswith("_") and leaf != "forward" and callable(value):
                    yield f"{prefix}{leaf}"


def _find(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module to change, and which of its attributes."""
    try:
        return layer.get_submodule(name), "forward"
    except AttributeError:
        path, _, leaf = name.rpartition(".")
        return layer.get_submodule(path), leaf


def _replace(module: nn.Module, attribute: str, call: Callable[..., Any]) -> None:
    setattr(module, attribute, call)


class _Block:
    """Stands in for a layer's forward: only its input is kept."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._call, *args, use_reentrant=False, **kwargs)


class _Layer:
    """Stands in for a layer's forward: what its parts return is not kept for others."""

    def __init__(self, call: Callable[..., Any], scope: _Scope) -> None:
        self._call = call
        self._scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        with self._scope.open():
            out = self._call(*args, **kwargs)
        if waiting := sorted(self._scope.waiting):
            raise LayoutError(
                f"recompute parts {', '.join(waiting)} were never called in the forward of their "
                "layer, so nothing would be recomputed. Name modules and methods that it calls."
            )
        return out


class _Scope:
    """What one forward of a layer has made in its parts.

    Attributes:
        waiting: Parts that have not been called yet.
        is_open: Whether the layer's forward is running, outside of any part.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.is_open = False
        # Storage address -> region, output, and that output: an address means something only as
        # long as its memory is held.
        self._made: dict[int, tuple[_Region, int, Tensor]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let tensors that are saved for the backward pass be promised where a part made them."""
        self.is_open = True
        try:
            with saved_tensors_hooks(self.promise, _fetch):
                yield
        finally:
            self.is_open = False
            self._made.clear()

    def add(self, tensor: Tensor, region: _Region, index: int) -> None:
        """Remember output number ``index`` of ``region``."""
        if type(tensor) is Tensor and (address := tensor.untyped_storage().data_ptr()):
            self._made.setdefault(address, (region, index, tensor.detach()))

    def promise(self, tensor: Tensor) -> Tensor | _Promise:
        """Return a promise of ``tensor`` where a part made it, else the tensor."""
        if type(tensor) is not Tensor:
            return tensor
        found = self._made.get(tensor.untyped_storage().data_ptr())
        if found is None or found[2].dtype != tensor.dtype:
            return tensor
        region, index, _ = found
        place = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return _Promise(region, index, place, tensor.requires_grad)


@dataclass(frozen=True)
class _Promise:
    """A tensor that a part can make again: a view of the memory of one of its outputs."""

    region: _Region
    index: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset
    requires_grad: bool

    def redeem(self) -> Tensor:
        return self.region.again()[self.index].as_strided(*self.place)


def _fetch(saved: Tensor | _Promise) -> Tensor:
    return saved.redeem() if isinstance(saved, _Promise) else saved


class _Part:
    """Stands in for a module's forward, or a method."""

    def __init__(self, name: str, call: Callable[..., Any], scope: _Scope) -> None:
        self._name = name
        self._call = call
        self._scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope = self._scope
        scope.waiting.discard(self._name)
        # Inside another part, in the backward pass, or where autograd keeps nothing: without
        # gradients, and in a function that says itself what its backward pass needs.
        if not (scope.is_open and torch.is_grad_enabled()):
            return self._call(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        region = _Region(self._call, structure, leaves, scope)
        scope.is_open = False
        try:
            out = region.run(leaves)
        finally:
            scope.is_open = True
        for index, tensor in enumerate(_tensors(out)):
            if tensor.requires_grad:
                scope.add(tensor, region, index)
        return out


class _Region:
    """One call of a part, which can be made again.

    Args:
        call: What the part does.
        structure: How ``leaves`` make up its arguments.
        leaves: Its arguments; those that other parts made are kept as promises.
        scope: The forward of the layer.
    """

    def __init__(
        self, call: Callable[..., Any], structure: Any, leaves: Sequence[Any], scope: _Scope
    ) -> None:
        self._call = call
        self._structure = structure
        self._kept = [scope.promise(x) if isinstance(x, Tensor) else x for x in leaves]
        self._outputs: list[Tensor] | None = None
        self._trigger: Tensor | None = None

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the part for the first time; what it saves inside is not kept."""
        first = [leaves]
        device = next((x.device for x in leaves if isinstance(x, Tensor)), None)
        hint = torch.empty(0, device=device)  # tells whose random state belongs to the call

        def compute(_: Tensor) -> Any:
            is_first = bool(first)
            args, kwargs = tree_unflatten(
                first.pop() if is_first else [self._argument(x) for x in self._kept],
                self._structure,
            )
            out = self._call(*args, **kwargs)
            if not is_first:
                self._outputs = [tensor.detach() for tensor in _tensors(out)]
                self._trigger = None  # its graph holds this call: a cycle, which nobody would free
            one = torch.ones((), requires_grad=True)
            # Saves a tensor, the last of all: who asks for it runs everything again, up to here.
            trigger = one * one
            if is_first:
                self._trigger = trigger
            return out

        return checkpoint(compute, hint, use_reentrant=False)

    def again(self) -> list[Tensor]:
        """Return what the part returned, from one run for this and for its own backward pass."""
        if self._outputs is None:
            assert self._trigger is not None and self._trigger.grad_fn is not None
            _ = self._trigger.grad_fn._saved_self  # type: ignore[attr-defined]
        assert self._outputs is not None
        return self._outputs

    @staticmethod
    def _argument(kept: Any) -> Any:
        if not isinstance(kept, _Promise):
            return kept
        return kept.redeem().requires_grad_(kept.requires_grad)


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
