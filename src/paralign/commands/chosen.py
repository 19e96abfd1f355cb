"""Loads the run of a command as it was asked for: the config's own, or a small copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paralign.commands.options import parse_count
from paralign.commands.terminal import print_result
from paralign.config.load import load_config
from paralign.config.run import RunConfig
from paralign.config.shrink import Shrunk, shrink
from paralign.errors import ConfigError
from paralign.launch.torchrun import current_world

Shrink = Annotated[
    bool,
    typer.Option(
        "--shrink",
        help="Take a laptop-sized copy of the run, in which sizes divide, differ and are routed as "
        "in the large one.",
    ),
]
World = Annotated[
    str | None,
    typer.Option(
        "--world",
        metavar="N",
        help="Number of ranks: the mesh must multiply to it; with --shrink, that of the copy (8).",
    ),
]


def load_run(
    config: Path,
    changes: Sequence[str],
    *,
    small: bool,
    world: str | None,
    quiet: bool = False,
) -> RunConfig:
    """Return the run in ``config``, or its small copy, and say what was shrunk.

    Args:
        config: A RUN.yaml.
        changes: ``key.path=value`` texts.
        small: ``--shrink``.
        world: ``--world``.
        quiet: Say nothing.

    Raises:
        ConfigError: The config is wrong, or cannot be shrunk to so many ranks.
    """
    started = current_world()
    world_size = None if world is None else parse_count("--world", world)
    if started is not None:
        if world_size not in (None, started.world_size):
            raise ConfigError(
                f"--world={world_size}, but torchrun has started {started.world_size} ranks. Leave "
                "--world out."
            )
        world_size = started.world_size
    if not small:
        return load_config(config, changes, world_size=world_size)
    shrunk = shrink(load_config(config, changes), world_size)
    if not quiet and (started is None or started.rank == 0):
        print_result(_table(shrunk))
    return shrunk.config


def _table(shrunk: Shrunk) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="italic", no_wrap=True)
    table.add_column()
    lines = list(shrunk.lines())
    table.add_row("shrunk", Text("" if lines else "nothing: no key can be smaller"))
    for section, text in lines:
        table.add_row(Text(section), Text(text))
    table.add_row()
    return table
