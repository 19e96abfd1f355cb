"""Whether two recorded runs have the same numbers: to the last bits, not only within a budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

# What names a recording or measures it, and is no number of the run.
_OF_THE_RECORDING = {"trace_id", "seconds", "created"}


# A repeated run differs in the last bits where a kernel's result depends on the place in memory.
_REPEAT_EPS = 8.0


def same_numbers(first: str | Path, second: str | Path) -> bool:
    """Tell whether two complete traces of the same kind of run hold the same numbers.

    Ranks that run the same schedule on the same threads repeat themselves to a few eps, mostly
    bitwise, so a fault after which they still do has changed nothing.
    """
    ours, theirs = _files(Path(first)), _files(Path(second))
    return ours.keys() == theirs.keys() and all(
        ours[name].read_bytes() == theirs[name].read_bytes() or _alike(ours[name], theirs[name])
        for name in ours
    )


def _files(folder: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _alike(ours: Path, theirs: Path) -> bool:
    if ours.suffix == ".json":
        return _close(_content(ours), _content(theirs))
    if ours.suffix != ".safetensors":
        return False
    try:
        x, y = load_file(ours), load_file(theirs)
    except SafetensorError:  # cut short, say: what differs there is no last bit
        return False
    return x.keys() == y.keys() and all(_repeats(x[name], y[name]) for name in x)


def _repeats(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y) or not x.is_floating_point():
        return torch.equal(x, y)
    limit = _REPEAT_EPS * torch.finfo(x.dtype).eps
    difference = float(torch.linalg.vector_norm(x.double() - y.double()))
    return difference <= limit * float(torch.linalg.vector_norm(x.double()))


def _close(x: Any, y: Any) -> bool:
    if isinstance(x, float) and isinstance(y, float):
        return x == y or math.isclose(x, y, rel_tol=_REPEAT_EPS * 2.0**-52)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_close(x[key], y[key]) for key in x)
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(_close(a, b) for a, b in zip(x, y, strict=True))
    return bool(x == y)


def _content(path: Path) -> Any:
    return _without(json.loads(path.read_text(encoding="utf-8")), _OF_THE_RECORDING)


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    return value
