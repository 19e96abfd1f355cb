"""``paralign drill``: injects faults into a run, and shows which of them the verdict names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paralign.commands.chosen import Shrink, World, load_run
from paralign.commands.options import (
    ConfigFile,
    HtmlFile,
    JsonFile,
    JunitFile,
    Overrides,
    Quiet,
    Timeout,
    Verbose,
    check_not_both,
    parse_seconds,
)
from paralign.commands.report import check_outputs, write_outputs
from paralign.commands.terminal import print_result, progress
from paralign.errors import ConfigError
from paralign.launch.torchrun import current_world

if TYPE_CHECKING:
    from paralign.prove.drill_report import DrillReport


def drill(
    config: ConfigFile,
    overrides: Overrides = None,
    faults: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Faults of your own (@pa.fault), tried as well."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Try only faults whose name begins so. Many times."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Say which faults there are, and run nothing.")
    ] = False,
    world: World = None,
    shrink: Shrink = False,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what every run recorded; a drill that was cut short goes on from there.",
        ),
    ] = None,
    timeout: Timeout = "300",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Break a run in every known way, one at a time, and see whether the verdict says so.

    A fault that changes no number is inert: there is nothing to catch.

    Exit status: 0 every other fault was caught, 1 not, 2 the config is wrong,
    3 the run without a fault failed.
    """
    check_not_both(quiet, verbose)
    seconds = parse_seconds("--timeout", timeout)
    if (started := current_world()) is not None:
        raise ConfigError(
            f"world size {started.world_size} was started by torchrun, but drill starts its own "
            "ranks on this machine, again after each fault that ends them. Run it without torchrun."
        )
    run = load_run(config, overrides or (), small=shrink, world=world, quiet=quiet)
    check_outputs(json=json, junit=junit, html=html)
    from paralign.commands.drill_cases import cases_of_drill  # these import torch
    from paralign.commands.drill_table import render, render_list
    from paralign.prove.drill import drill as run_drill
    from paralign.prove.fault_list import all_faults

    if list_:
        print_result(render_list(all_faults(faults), run))
        return 0
    with progress(quiet=quiet) as say:
        report: DrillReport = run_drill(
            run,
            faults=faults,
            only=only or (),
            trace=trace,
            timeout=seconds,
            progress=say,
        )
    write_outputs(cases_of_drill(report), report.to_json, json=json, junit=junit, html=html)
    print_result(render(report, quiet=quiet, verbose=verbose))
    return report.exit_status
