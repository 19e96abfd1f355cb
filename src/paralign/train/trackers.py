"""Where else the lines of ``metrics.jsonl`` go: TensorBoard, and Weights & Biases.

Both are optional packages, imported where they are used; one rank writes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from paralign.config.extras import missing_packages
from paralign.config.run import RunConfig
from paralign.errors import ConfigError, TrainingError
from paralign.train.metrics import Metrics, Validation
from paralign.train.tensor_files import write_durably

FOLDER = "tensorboard"
RUN_FILE = "wandb.json"
"""Holds the id of the run, so that it goes on as the same one."""


class Tracker(Protocol):
    """Takes the numbers of a line."""

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write them."""
        ...

    def close(self, *, is_failed: bool) -> None:
        """Write what is left."""
        ...


def open_trackers(config: RunConfig, folder: Path, *, step: int) -> list[Tracker]:
    """Open what the config asks for.

    Args:
        config: The run.
        folder: The run's folder.
        step: Steps that the run goes on from: lines of later ones, that were lost, are left out as
            far as the package can.

    Raises:
        ConfigError: A package is missing, or refuses to begin.
    """
    if problems := missing_packages(config):
        raise ConfigError.from_problems("cannot track the run", problems)
    trackers: list[Tracker] = []
    if config.metrics.tensorboard:
        trackers.append(TensorBoard(folder / FOLDER, step=step))
    if config.metrics.wandb is not None:
        trackers.append(WeightsAndBiases(config, folder))
    return trackers


def numbers_of(line: Metrics | Validation) -> dict[str, float]:
    """Return the numbers of a line by name, those of a group as ``group/name``."""
    return dict(_numbers("", asdict(line)))


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, (int, float)) and name != "step":
            yield f"{prefix}{name}", value


class TensorBoard:
    """Event files; those of a run that goes on hide what earlier ones have of later steps.

    Args:
        folder: Where they are.
        step: Steps that the run goes on from.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """See :class:`Tracker`.

        Raises:
            TrainingError: The disk is full, or the file cannot be written.
        """
        try:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._folder} cannot be written: {error.strerror}. Make room there, or set "
                "metrics.tensorboard=false; the run goes on from its last checkpoint."
            ) from None

    def close(self, *, is_failed: bool) -> None:
        """See :class:`Tracker`."""
        self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases, however often it goes on.

    Lines of steps that were lost stay: there, what came first for a step counts.

    Args:
        config: The run.
        folder: Its folder.

    Raises:
        ConfigError: The package refuses to begin, because it has no key for example.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        wandb: Any = import_module("wandb")
        section = config.metrics
        try:
            self._run: Any = wandb.init(
                project=section.wandb,
                name=folder.absolute().name,
                id=_run_id(folder),
                resume="allow",
                dir=str(folder),
                mode=section.wandb_mode,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off"),  # what is said is the launcher's to show
            )
        except wandb.Error as error:
            raise ConfigError(
                f"metrics.wandb={section.wandb!r}: {error} Log in with `wandb login`, or use "
                "metrics.wandb_mode=offline."
            ) from error

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """See :class:`Tracker`."""
        self._run.log(dict(numbers), step=step)

    def close(self, *, is_failed: bool) -> None:
        """See :class:`Tracker`."""
        self._run.finish(exit_code=int(is_failed))


def _run_id(folder: Path) -> str:
    """Return the id of the run in ``folder``, a new one if it has none."""
    path = folder / RUN_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Remove it to begin a new run of Weights & Biases."
        ) from None
    made = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{RUN_FILE}.partial"
    write_durably(partial, json.dumps({"id": made}) + "\n")
    partial.replace(path)
    return made
