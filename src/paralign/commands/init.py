"""``paralign init``: writes a commented RUN.yaml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paralign.commands.files import check_writable, write_atomically
from paralign.commands.terminal import print_result
from paralign.config.presets import DEFAULT_PRESET, PRESETS, find_preset
from paralign.config.rules import find_problems
from paralign.config.template import render
from paralign.errors import ConfigError


def init(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help=f"One of {', '.join(PRESETS)}.")
    ] = DEFAULT_PRESET,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")
    ] = Path("RUN.yaml"),
    world: Annotated[
        int | None,
        typer.Option("--world", metavar="N", min=1, help="Refuse unless its mesh has N ranks."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> int:
    """Write a commented RUN.yaml to start from.

    Every key is in it, with what it means.
    """
    config = find_preset(preset)
    if world is not None and (found := find_problems(config, world_size=world)):
        raise ConfigError.from_problems(f"PRESET={preset!r} does not fit --world={world}", found)
    check_writable("--output", output)
    if output.exists() and not force:
        raise ConfigError(
            f"--output={str(output)!r} exists already. Use --force to replace it, or give another "
            "--output."
        )
    write_atomically(output, render(config, title=f"A run of paralign, from preset {preset}."))
    print_result(Text(f"wrote {output}; next: paralign align {output}"))
    return 0
