"""Checks that a blueprint composes to the model it describes, before any rank starts.

Two questions: does every parameter belong to exactly one piece, and do the pieces, run one after
the other, give bitwise what the model's own ``forward`` gives?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paralign.blueprint import Batch, Blueprint
from paralign.dropout import name_dropouts
from paralign.errors import ConfigError
from paralign.models.rules import did_you_mean
from paralign.parallel.stage import Stage


def check_composition(model: nn.Module, blueprint: Blueprint, batch: Batch) -> None:
    """Check that ``blueprint`` describes ``model``; changes neither.

    Comm:
        none. Runs two forwards on the device of the model, without gradients.

    Args:
        model: The whole model, with real weights.
        blueprint: Its blueprint.
        batch: ``tokens`` and ``positions``, each ``[B, S]``: whole sequences. With dropout
            ``draws`` as well.

    Raises:
        ConfigError: Names that match nothing, parameters in no piece or in two, or the first piece
            whose result differs from that of the model's own ``forward``.
    """
    title = f"{type(blueprint).__name__} does not describe {type(model).__name__}"
    if problems := structure_problems(model, blueprint):
        raise ConfigError.from_problems(title, problems)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} is on the meta device, so that its composition cannot be run. "
            "Give the model real weights, on the CPU if they fit nowhere else."
        )
    name_dropouts(model)
    own = _Run()
    composed = _Run()
    with torch.no_grad():
        with _unchanged(model), _recorded(own, _layers(model, blueprint)):
            own.logits = blueprint.forward(model, batch)
        with _unchanged(model):
            _run_pieces(composed, model, blueprint, batch, title)
    if difference := _first_difference(own, composed):
        raise ConfigError(f"{title}: {difference}")


def structure_problems(model: nn.Module, blueprint: Blueprint) -> list[str]:
    """Return what is wrong with the names in ``blueprint``, one sentence each.

    Works on any device, meta included.
    """
    layers = _layers(model, blueprint)
    if not layers:
        lists = [
            name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
        ]
        hint = did_you_mean(blueprint.layers_name, lists) if lists else "The model has none."
        return [f"layers_name={blueprint.layers_name!r} is no ModuleList with layers in it. {hint}"]
    return [
        *_unknown_pieces(model, "prologue_names", blueprint.prologue_names),
        *_unknown_pieces(model, "epilogue_names", blueprint.epilogue_names),
        *_coverage_problems(model, blueprint),
        *_unused_problems(model, blueprint.unused_parameters),
        *_attention_problems(blueprint, layers),
    ]


class _Run:
    """What one forward passed from piece to piece; layers that were never called are absent."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor | None] = {}
        self.outputs: dict[str, Tensor | None] = {}
        self.calls: dict[str, int] = {}
        self.logits: Any = None


def _layers(model: nn.Module, blueprint: Blueprint) -> list[tuple[str, nn.Module]]:
    """Return the layers by global name; none when ``layers_name`` is wrong."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holder = modules.get(blueprint.layers_name)
    if not isinstance(holder, nn.ModuleList):
        return []
    return [(f"{blueprint.layers_name}.{index}", layer) for index, layer in enumerate(holder)]


def _unknown_pieces(model: nn.Module, field: str, names: Sequence[str]) -> list[str]:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        f"{field} has {name!r}, which is no module or parameter of the model. "
        f"{did_you_mean(name, [child for child, _ in model.named_children()])}"
        for name in names
        if name not in known or not name
    ]


def _coverage_problems(model: nn.Module, blueprint: Blueprint) -> list[str]:
    pieces = [*blueprint.prologue_names, blueprint.layers_name, *blueprint.epilogue_names]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    owners = {
        name: [piece for piece in pieces if name == piece or name.startswith(f"{piece}.")]
        for name in parameters
    }
    problems = []
    if none := [name for name, found in owners.items() if not found]:
        problems.append(
            f"no piece owns {', '.join(none)}. Add the module or the parameter to prologue_names "
            "or epilogue_names, or move it into a layer."
        )
    shared: dict[str, list[str]] = {}
    for name, found in owners.items():
        if len(found) > 1:
            shared.setdefault(" and ".join(found), []).append(name)
    problems += [
        f"pieces {owning} both own {', '.join(names)}. Leave them in one."
        for owning, names in shared.items()
    ]
    return problems


def _unused_problems(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [
        f"unused_parameters has {pattern!r}, which matches no parameter. "
        f"{did_you_mean(pattern, parameters)}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in parameters)
    ]


def _attention_problems(blueprint: Blueprint, layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    problems = []
    for core in blueprint.attention():
        lacking = [
            (name, layer)
            for name, layer in layers
            if core not in dict(layer.named_modules(remove_duplicate=False)) or not core
        ]
        if lacking:
            known = [inner for inner, _ in lacking[0][1].named_modules() if inner]
            problems.append(
                f"attention() has {core!r}, but {', '.join(name for name, _ in lacking)} have no "
                f"such module. {did_you_mean(core, known)}"
            )
    return problems


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Give both runs the same random numbers, and put back random state and buffers."""
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(0)
        yield
    for buffer, before in buffers:
        buffer.copy_(before)


@contextmanager
def _recorded(run: _Run, layers: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    handles = []
    for name, layer in layers:

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            run.inputs[name] = _first_tensor((args, kwargs))
            run.calls[name] = run.calls.get(name, 0) + 1

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            run.outputs[name] = _first_tensor(output)

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor, which is the one that flows from layer to layer."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    # A clone, since a layer may change its input in place.
    return next((tensor.clone() for tensor in tensors if tensor.is_floating_point()), None)


def _run_pieces(
    run: _Run, model: nn.Module, blueprint: Blueprint, batch: Batch, title: str
) -> None:
    layers = _layers(model, blueprint)
    everything = range(len(layers))
    pieces = Stage(model, blueprint, layers=everything, is_first=True, is_last=True)
    with _named("context", title):
        context = blueprint.context(batch, seq_len=batch["tokens"].shape[1])
    with _named("prologue", title):
        x = blueprint.prologue(pieces, batch, context)
    for name, layer in layers:
        with _named(name, title):
            run.inputs[name] = x.clone()
            x = blueprint.layer(layer, x, context)
            run.outputs[name] = x.clone()
    with _named("epilogue", title):
        run.logits = blueprint.epilogue(pieces, x, context)


@contextmanager
def _named(piece: str, title: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{title}: {piece} raised {type(error).__name__}: {error}") from error


def _first_difference(own: _Run, composed: _Run) -> str | None:
    """Return a sentence about the first piece, in the order of execution, whose result differs."""
    if repeated := [name for name, calls in own.calls.items() if calls > 1]:
        return (
            f"the model's own forward runs {', '.join(repeated)} more than once, but a pipeline "
            "runs each layer once. Unroll the loop into layers of their own."
        )
    before = "prologue"
    for name in composed.inputs:
        if name in own.inputs:
            if difference := _difference(own.inputs[name], composed.inputs[name]):
                return f"{before} gives {name} another input than forward does: {difference}."
            if difference := _difference(own.outputs[name], composed.outputs[name]):
                return (
                    f"{name} differs from what it gives inside forward, on the same input: "
                    f"{difference}. Compare what context and layer pass to it with what forward "
                    "passes."
                )
        before = name
    if difference := _difference(own.logits, composed.logits):
        return f"epilogue gives other logits than forward does: {difference}."
    return None


def _difference(own: Any, composed: Any) -> str | None:
    if not (isinstance(own, Tensor) and isinstance(composed, Tensor)):
        return f"{type(own).__name__} in forward, {type(composed).__name__} in the pieces"
    if own.shape != composed.shape or own.dtype != composed.dtype:
        return (
            f"{own.dtype} of shape {tuple(own.shape)} in forward, {composed.dtype} of shape "
            f"{tuple(composed.shape)} in the pieces"
        )
    if torch.equal(own, composed):
        return None
    if bool(own.isnan().any()) and torch.equal(own.isnan(), composed.isnan()):
        return "forward gives NaN, which equals nothing. Give the model finite weights"
    off = int((own != composed).sum())
    worst = float((own - composed).abs().max())
    return f"{off} of {own.numel()} elements differ, by at most {worst:.3g}"
