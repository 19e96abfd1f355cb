"""``paralign train``: trains a run to its end, or goes on with one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from paralign.commands.chosen import load_run
from paralign.commands.options import (
    ConfigFile,
    Overrides,
    Quiet,
    Timeout,
    Verbose,
    check_not_both,
    parse_seconds,
)
from paralign.commands.terminal import print_result, reading
from paralign.config.extras import missing_packages
from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.launch import current_world, join_world, run_ranks, start_fork_server
from paralign.requirements import require_torch


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    seed_checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--seed-checkpoint",
            metavar="FOLDER",
            help="Write the weights that the run starts with to a new folder, and do not train.",
        ),
    ] = None,
    timeout: Timeout = "600",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train a run, from its last checkpoint if there is one.

    Starts the ranks on this machine, or joins those that torchrun started. What
    train.dir holds decides whether the run begins or goes on, on this mesh or
    another one. SIGTERM ends it after the step it is in, with a checkpoint.

    Exit status: 0 done or stopped by request, 2 the config is wrong, 3 a rank
    failed or hung, or training could not go on.
    """
    check_not_both(quiet, verbose)
    seconds = parse_seconds("--timeout", timeout)
    world = current_world()
    run = load_run(config, overrides or (), quiet=quiet)
    check_trainable(run)
    if seed_checkpoint is not None and seed_checkpoint.exists():
        raise ConfigError(
            f"--seed-checkpoint={str(seed_checkpoint)!r} exists already. Give the name of a new "
            "folder."
        )
    say = _nothing if quiet else _say
    if world is None:
        start_fork_server("paralign.train.loop")
    require_torch(feature="paralign train")
    _prepare(run, quiet=quiet, verify=world is None or world.rank == 0)
    if world is None:
        _train_locally(run, seed_checkpoint, seconds, say)
    else:
        with join_world(run.device, timeout=seconds, describe=run.mesh.degrees.describe_rank):
            from paralign.train.loop import run_training
            from paralign.train.seed import write_seed

            if seed_checkpoint is None:
                run_training(run, say)
            else:
                write_seed(run, seed_checkpoint, say)
    return 0


def _prepare(config: RunConfig, *, quiet: bool, verify: bool) -> None:
    """Make token files before ranks start, or before they join, when waiting has no time limit."""
    from paralign.train.data import prepare_data

    with reading(quiet=quiet, what="tokens") as report:
        prepare_data(config, report=report, verify=verify)


def check_trainable(config: RunConfig) -> None:
    """Check what only training needs: code of paralign's own, packages, and a folder to write to.

    Raises:
        ConfigError: One is missing; all are listed.
    """
    problems = []
    if config.program is not None:
        problems.append(
            f"program={config.program!r} is code of your own, which `paralign align` judges. Train "
            "it with its own loop, or remove `program`."
        )
    problems += missing_packages(config)
    folder = Path(config.train.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problems.append(
            f"train.dir={config.train.dir!r} cannot be written: {error.strerror}. Give a folder "
            "that can."
        )
    if problems:
        raise ConfigError.from_problems("cannot train", problems)


def _train_locally(
    config: RunConfig, seed_checkpoint: Path | None, timeout: float, say: Callable[[str], None]
) -> None:
    from paralign.train.loop import run_local_rank
    from paralign.train.seed import write_seed_on_rank
    from paralign.train.stop import STOP_SIGNALS

    degrees = config.mesh.degrees
    function: Any = run_local_rank if seed_checkpoint is None else write_seed_on_rank
    run_ranks(
        function,
        degrees.world_size,
        config,
        *(() if seed_checkpoint is None else (seed_checkpoint,)),
        device=config.device,
        timeout=timeout,
        describe=degrees.describe_rank,
        on_event=lambda rank, text: say(str(text)),
        forward=STOP_SIGNALS,
    )


def _say(text: str) -> None:
    print_result(Text(text))  # names in it are not markup


def _nothing(text: str) -> None:
    """Say nothing."""
