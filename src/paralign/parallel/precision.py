"""Parts of the model that stay in float32 where the rest is computed in less.

::

    embedding -> stream --------+------------------ + -> ...    residual: the stream
                                v                   |
                               norm -> attention -> out         softmax: inside the attention core
    ... -> norm -> head -> logits -> loss                       logits: the head; the loss always is

A plain module knows nothing of this: its parts are found by the names in the blueprint and their
``forward`` is wrapped, on every rank, on one device and on the meta device alike, so that a
reference run follows the same policy.

Ref:
    Micikevicius et al., "Mixed Precision Training", 2017. https://arxiv.org/abs/1710.03740
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint, matches_name
from paralign.local_weights import parameters_seen_as
from paralign.parallel.data import PARTS, Precision

Forward = Callable[..., Any]


def precision_problems(model: nn.Module, blueprint: Blueprint, precision: Precision) -> list[str]:
    """Return why ``precision`` cannot be honoured, one sentence each.

    Args:
        model: The whole model with its master weights, on any device.
        blueprint: Its blueprint.
        precision: Dtypes of the step.
    """
    master = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    compute = precision.compute or master
    problems = []
    for part in PARTS:
        dtype = getattr(precision, part)
        if dtype is None:
            continue
        if dtype != torch.float32:
            problems.append(f"{part}={_name(dtype)} must be float32, or None for the compute dtype")
        elif compute.itemsize >= torch.float32.itemsize:
            problems.append(
                f"{part}=float32 has no effect on compute={_name(compute)}, which is not less. "
                f"Leave {part} out, or compute in bfloat16"
            )
    if precision.softmax is not None and not blueprint.attention():
        problems.append(
            "softmax=float32 needs the attention core, and the blueprint names none. Return it "
            "from Blueprint.attention()"
        )
    if precision.residual is not None:
        problems += _stream_problems(model, blueprint)
    return problems


def _stream_problems(model: nn.Module, blueprint: Blueprint) -> Iterator[str]:
    names = [name for name, _ in model.named_modules() if name]
    for field in ("stream_sources", "stream_readers"):
        patterns = getattr(blueprint, field)
        if not patterns:
            yield (
                f"residual=float32 needs {field} of the blueprint, which is empty. Name the "
                "modules whose output starts the residual stream (sources), and those that take it "
                "as input (readers: norms)"
            )
        for pattern in patterns:
            if not any(matches_name(name, pattern) for name in names):
                yield f"residual=float32: {field} has {pattern!r}, which matches no module"


def apply_precision(root: nn.Module, blueprint: Blueprint, precision: Precision) -> None:
    """Wrap the parts of ``root`` that stay in float32. Do it before any axis is applied.

    Exact: a part that computes in float32 already is the same to the last bit.

    Args:
        root: A stage, a whole model, or its copy on the meta device, with global names; what
            :func:`precision_problems` found nothing in.
        blueprint: Where the parts are.
        precision: Dtypes of the step.
    """
    compute = precision.compute
    if compute is None or all(getattr(precision, part) is None for part in PARTS):
        return
    for name, module in root.named_modules():
        if precision.softmax is not None and _is_core(name, blueprint):
            _wrap(module, _wide_attention(module.forward))
        if precision.logits is not None and name == blueprint.head_name:
            _wrap(module, _wide_module(module, module.forward, None))
        if precision.residual is not None:
            if any(matches_name(name, pattern) for pattern in blueprint.stream_readers):
                _wrap(module, _wide_module(module, module.forward, compute))
            if any(matches_name(name, pattern) for pattern in blueprint.stream_sources):
                # A hook: what tensor parallelism sends for the module stays in the compute dtype.
                module.register_forward_hook(_widen_output)


def _is_core(name: str, blueprint: Blueprint) -> bool:
    return any(
        matches_name(name, f"{blueprint.layers_name}.*.{core}") for core in blueprint.attention()
    )


def _wrap(module: nn.Module, forward: Any) -> None:
    module.forward = forward


def _widen_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


def _wide_attention(forward: Forward) -> Forward:
    """Let a core see q, k, v and an additive mask in float32, and give back the dtype of q."""

    @functools.wraps(forward)  # whoever attaches to a core reads its signature
    def wide(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if _is_floating(x)]
        out = forward(*map(_widened, args), **{name: _widened(x) for name, x in kwargs.items()})
        return out.to(given[0].dtype) if given and _is_floating(out) else out

    return wide


def _wide_module(module: nn.Module, forward: Forward, result: torch.dtype | None) -> Forward:
    """Let a module compute in float32, weights included, and return ``result`` (None: float32)."""

    @functools.wraps(forward)
    def wide(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Their gradients arrive in the parameters' own dtype.
        with parameters_seen_as(module, lambda leaf, parameter: parameter.float()):
            out = forward(x.float(), *args, **kwargs)
        return out if result is None else out.to(result)

    return wide


def _widened(x: Any) -> Any:
    return x.float() if _is_floating(x) else x


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
