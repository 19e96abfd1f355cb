"""``paralign check``: every static rule, then what the plan will do, without starting a rank."""

from __future__ import annotations

from paralign.commands.chosen import Shrink, World, load_run
from paralign.commands.options import ConfigFile, Overrides, Verbose
from paralign.commands.terminal import print_result
from paralign.errors import ConfigError


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    shrink: Shrink = False,
    verbose: Verbose = False,
) -> int:
    """Check every rule of a config, and show the plan it makes.

    Starts no rank. Shows what the support table says, parameters, memory and
    communication per rank, and over which axes each gradient is summed.
    """
    run = load_run(config, overrides or (), small=shrink, world=world)
    if run.program is not None:
        raise ConfigError(
            f"program={run.program!r}: check shows the plan of paralign's own parallel code, and "
            "this one is yours. Use `paralign align` to judge it."
        )
    from paralign.prove.check import describe_plan  # imports torch: only for a config that is sound

    print_result(describe_plan(run, verbose=verbose))
    return 0
