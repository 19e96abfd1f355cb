"""Seed checkpoints: the weights of a run before its first step, which any mesh can start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.launch import report_event
from paralign.train.build import build_program, training_numerics
from paralign.train.checkpoint import Checkpoints

HOLDS = "holds"
"""Key of a checkpoint's state that says what it has, where that is not all that a run needs."""
WEIGHTS = "weights"


def seed_state(config: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint that holds only weights says of itself."""
    return {
        HOLDS: WEIGHTS,
        "num_tokens": 0,
        "optimizer_steps": 0,
        "config": config.model_dump(mode="json"),
    }


def write_seed(config: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Write the weights that ``config`` starts with to ``folder/step-00000000``, from all ranks.

    Args:
        config: The run. Its mesh decides only which rank writes what.
        folder: Where; it must not exist yet.
        say: Told where it is, on the first rank.

    Comm:
        As a save of :class:`paralign.train.checkpoint.Checkpoints`.

    Raises:
        ConfigError: The weights of ``model.start_from`` are not exactly those of the model.
        TrainingError: It cannot be written.
    """
    program = build_program(config.for_training(), training_numerics(config))
    checkpoints = Checkpoints(folder, keep=1, is_async=False)
    checkpoints.save(0, program.state_dict(), seed_state(config))
    if dist.get_rank() == 0:
        say(f"wrote {folder / 'step-00000000'}; start from it with model.start_from={folder}")


def write_seed_on_rank(config: RunConfig, folder: Path) -> None:
    """Write a seed on a rank that ``run_ranks`` has started."""
    write_seed(config, folder, report_event)


def check_holds_all(path: Path, state: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint that holds only weights.

    Raises:
        ConfigError: It does.
    """
    if state.get(HOLDS) == WEIGHTS:
        raise ConfigError(
            f"{path} holds only weights, so a run can start from it but not go on. Move it out of "
            "train.dir, and give its path as model.start_from."
        )
