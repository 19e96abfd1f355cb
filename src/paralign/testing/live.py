"""Turn live modules right after backward, or bare gradients, into traces that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align.record import record
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.trace import Facts, RankIndex
from paralign.align.trace_writer import TraceWriter, dtype_name, prepare_folder
from paralign.errors import ConfigError
from paralign.layout import whole

Side = str | Path | nn.Module | Sequence[nn.Module] | Mapping[str, Tensor | None]
"""A trace folder, a module (or pipeline chunks) with gradients, or gradients by global name."""


class _StepEnd:
    """Stands for an optimizer: its step ends the recorded step and moves nothing."""

    def step(self) -> None:
        """Do nothing."""


def is_trace(side: Any) -> bool:
    """Whether a side is the folder of a trace."""
    return isinstance(side, str | Path)


def is_module(side: Any) -> bool:
    """Whether a side is a module, or several."""
    if isinstance(side, nn.Module):
        return True
    return isinstance(side, list | tuple) and bool(side) and isinstance(side[0], nn.Module)


def record_module(
    folder: Path,
    modules: Any,
    *,
    weights: bool,
    mesh: Any = None,
    names: Any = None,
    shards: Any = None,
    alone: bool = False,
) -> None:
    """Record the gradients that modules have now, and their weights.

    Comm:
        One broadcast over the default process group, unless ``alone``.
    """
    end = _StepEnd()
    recorder = record(
        folder,
        modules,
        mesh=mesh,
        optimizer=end,
        what=("params", "grads") if weights else ("grads",),
        names=names,
        shards=shards,
        alone=alone,
    )
    with recorder:
        recorder.gradients()
        end.step()


def write_gradients(folder: Path, gradients: Mapping[str, Tensor | None]) -> None:
    """Write whole gradients as the trace of a run on one device.

    Raises:
        ConfigError: There are none, or one is no tensor.
    """
    problems = [
        f"{name!r} is a {type(value).__name__}, not a tensor or None"
        for name, value in gradients.items()
        if value is not None and not isinstance(value, Tensor)
    ]
    held = [value for value in gradients.values() if isinstance(value, Tensor)]
    if not held:
        problems.append("there is no gradient to compare with")
    if problems:
        raise ConfigError.from_problems("cannot take these reference gradients", problems)
    prepare_folder(folder, rank=0, clear_all=True)
    index = RankIndex(0, 1, "reference", steps=[0])
    writer = TraceWriter(folder, index)
    writer.write("step0.grad", [_entry(name, value) for name, value in gradients.items()])
    dtypes = [str(value.dtype).removeprefix("torch.") for value in held]
    run = {"compute_dtype": max(set(dtypes), key=dtypes.count)}
    versions = {"torch": str(torch.__version__)}
    writer.finish(Facts("reference", 1, [0], ["grads"], versions, run))


def _entry(name: str, gradient: Tensor | None) -> tuple[TensorEntry, Tensor | None]:
    shape = () if gradient is None else tuple(gradient.shape)
    dtype = "float32" if gradient is None else dtype_name(gradient.dtype, name)
    entry = TensorEntry(Kind.GRAD, name, 0, dtype, shape, whole(shape))
    return entry, None if gradient is None else gradient.detach()
