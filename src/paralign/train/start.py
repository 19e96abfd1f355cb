"""Where the weights of a run come from at its start, other than from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.program import Program
from paralign.train.checkpoint import Checkpoint
from paralign.train.checkpoint_load import verify
from paralign.weights.folders import find_place, read_state
from paralign.weights.initial import load_initial


def start_program(program: Program, config: RunConfig) -> None:
    """Fill this rank's parameters and router biases with the weights of ``model.start_from``.

    Does nothing where the config names none.

    Comm:
        Two all-gathers of small objects; ranks share the work of verifying a checkpoint.

    Raises:
        ConfigError: They are not exactly those of the model.
        TrainingError: A checkpoint is damaged.
    """
    source = config.model.start_from
    if source is None:
        return
    place = find_place(source)
    if place.kind == "checkpoint":
        verify(Checkpoint(place.path, int(read_state(place.path)["step"])))
    unused = load_initial(
        program.modules,
        source,
        mesh=program.mesh,
        names=program.tied_aliases or None,
    )
    everyone: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, unused)
    _check_all_used(source, set(everyone[0]).intersection(*everyone))


def start_whole(model: nn.Module, config: RunConfig) -> None:
    """Fill a whole model on one device as :func:`start_program` fills its parts.

    Raises:
        ConfigError: The weights are not exactly those of the model.
    """
    source = config.model.start_from
    if source is not None:
        _check_all_used(source, load_initial(model, source, alone=True))


def _check_all_used(source: str, unused: set[str] | list[str]) -> None:
    if unused:
        problems = [f"{name} is in it and not in the model" for name in sorted(unused)]
        raise ConfigError.from_problems(f"cannot start from {source!r}", problems)
