"""Whether two recorded runs have the same numbers to the last bit, not only within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# What names a recording or measures it, and is no number of the run.
_OF_THE_RECORDING = {"trace_id", "seconds", "created"}
_OF_THE_PAYLOAD = {"__metadata__"}


def same_numbers(first: str | Path, second: str | Path) -> bool:
    """Tell whether two complete traces of the same kind of run hold the same bits.

    Ranks that run the same schedule on the same threads repeat themselves bitwise, so a fault after
    which they still do has changed nothing.
    """
    ours, theirs = _files(Path(first)), _files(Path(second))
    return ours.keys() == theirs.keys() and all(
        _content(ours[name]) == _content(theirs[name]) for name in ours
    )


def _files(folder: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _content(path: Path) -> Any:
    if path.suffix == ".json":
        return _without(json.loads(path.read_text(encoding="utf-8")), _OF_THE_RECORDING)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")  # safetensors: the header's size, the header
    return _without(json.loads(data[8:start]), _OF_THE_PAYLOAD), data[start:]


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    return value
