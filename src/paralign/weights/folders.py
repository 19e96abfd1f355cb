"""What lies at a path that weights are to come from, and of which model they are. Needs no torch.

::

    run/                        the folder of a run: its newest checkpoint
      checkpoints/
        step-00000200/          a checkpoint: state.json beside safetensors
    seed/step-00000000/         a checkpoint of initial weights, as `train --seed-checkpoint` writes
    mixtral/                    a published model: config.json beside safetensors
    weights.safetensors         whole tensors by the model's own names
    trace/                      a recorded run
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paralign.errors import ConfigError, TraceError
from paralign.models.registry import MODELS, ModelEntry, find_model

STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
OPTIMIZER = "optimizer."
"""What names of optimizer state in a checkpoint start with; the rest are parameters and buffers."""
STEP_NAME = re.compile(r"step-(\d{8,})")
"""Name of a complete checkpoint."""

Kind = Literal["file", "checkpoint", "published", "trace"]


@dataclass(frozen=True)
class Place:
    """Where weights are.

    Attributes:
        kind: What it is.
        path: The file, or the folder with the files.
    """

    kind: Kind
    path: Path


@dataclass(frozen=True)
class Described:
    """The model that weights are of.

    Attributes:
        entry: Its family.
        config: Its hyper-parameters.
        raw: ``config.json``, of a published model.
    """

    entry: ModelEntry
    config: Any
    raw: Mapping[str, Any]


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of the complete checkpoints in ``folder``, the newest last."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := STEP_NAME.fullmatch(path.name)) and path.is_dir()
    )


def find_place(source: str | Path) -> Place:
    """Return what is at ``source``.

    Raises:
        TraceError: Nothing is there.
    """
    path = Path(source)
    if path.is_file():
        return Place("file", path)
    if not path.is_dir():
        raise TraceError(f"{path}: there is no such folder or file.")
    if (path / STATE_FILE).is_file():
        return Place("checkpoint", path)
    for folder in (path, path / "checkpoints"):
        if found := complete_checkpoints(folder):
            return Place("checkpoint", found[-1][1])
    return Place("published" if (path / CONFIG_FILE).is_file() else "trace", path)


def describe(place: Place) -> Described | None:
    """Return the model that weights are of, where it is said and paralign's own.

    Raises:
        ConfigError: ``config.json`` says what paralign cannot compute; all problems are listed.
            Or a file cannot be read.
    """
    if place.kind == "published":
        return read_published(place.path)
    return described_by(place.path, read_state(place.path)) if place.kind == "checkpoint" else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself.

    Raises:
        ConfigError: It cannot be read.
    """
    return read_json(checkpoint / STATE_FILE)


def described_by(checkpoint: Path, state: Mapping[str, Any]) -> Described | None:
    """Return the model of a checkpoint; None if it is somebody's own.

    Raises:
        ConfigError: It says no model, or one that this version has not.
    """
    try:
        section = dict(state["config"]["model"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{checkpoint}: its {STATE_FILE} does not name its model.") from None
    name, preset = section.pop("name", None), section.pop("preset", None)
    for key in ("build", "blueprint", "start_from"):
        section.pop(key, None)
    if name is None:
        return None
    entry = find_model(str(name))
    return Described(entry, entry.configure(preset, section), {})


def read_published(folder: Path) -> Described:
    """Read the ``config.json`` of a published model.

    Raises:
        ConfigError: The model is of no family of paralign's, or it computes what paralign cannot;
            all problems are listed.
    """
    raw = read_json(folder / CONFIG_FILE)
    kind = raw.get("model_type")
    entry = family_of(kind)
    if entry is None:
        known = [name for one in MODELS.values() for name in one.published.model_types]
        raise ConfigError(
            f"{folder / CONFIG_FILE}: model_type={kind!r} is no model that paralign has. It reads "
            f"{', '.join(known)}."
        )
    values, problems = entry.published.read(raw)
    config = None
    if not problems:
        config = entry.config_type(**values)
        problems = config.problems()
    if problems:
        title = f"{folder / CONFIG_FILE} is of a model that paralign cannot compute"
        raise ConfigError.from_problems(title, problems)
    return Described(entry, config, raw)


def family_of(model_type: Any) -> ModelEntry | None:
    """Return the family that is published under ``model_type``, if any."""
    found = (entry for entry in MODELS.values() if model_type in entry.published.model_types)
    return next(found, None)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return found
