"""Loads the run of a command as it was asked for: the config's own, or a small copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paralign.commands.options import parse_count
from paralign.commands.terminal import print_notice, print_result
from paralign.config.load import load_config
from paralign.config.notices import notices
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
    small: bool = False,
    world: str | None = None,
    quiet: bool = False,
) -> RunConfig:
    """Return the run in ``config``, or its small copy, and say what is not as asked.

    What was shrunk goes to stdout, notices to stderr; under torchrun, one rank says both.

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
    speaks = not quiet and (started is None or started.rank == 0)
    # The mesh of a small copy is made to fit; that of the run itself has to.
    run = load_config(config, changes, world_size=None if small else world_size)
    if speaks:
        for text in notices(run):
            print_notice(text)
    if not small:
        return run
    shrunk = shrink(run, world_size)
    if speaks:
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
