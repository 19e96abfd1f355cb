"""``paralign check``: every static rule, then what the plan will do, without starting a rank."""

from __future__ import annotations

from typing import Annotated

import typer

from paralign.commands.options import ConfigFile, Overrides, Verbose, parse_count
from paralign.commands.terminal import print_result
from paralign.config.load import load_config
from paralign.errors import ConfigError
from paralign.launch.torchrun import current_world


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks there will be; the mesh must multiply to it."),
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Check every rule of a config, and show the plan it makes.

    Starts no rank. Shows what the support table says, parameters, memory and
    communication per rank, and over which axes each gradient is summed.
    """
    torchrun = current_world()
    world_size = torchrun.world_size if torchrun is not None else None
    if world is not None:
        world_size = parse_count("--world", world)
    run = load_config(config, overrides or (), world_size=world_size)
    if run.program is not None:
        raise ConfigError(
            f"program={run.program!r}: check shows the plan of paralign's own parallel code, and "
            "this one is yours. Use `paralign align` to judge it."
        )
    from paralign.prove.check import describe_plan  # imports torch: only for a config that is sound

    print_result(describe_plan(run, verbose=verbose))
    return 0
