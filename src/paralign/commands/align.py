"""``paralign align``: runs the reference and the parallel run, and judges one by the other."""

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
from paralign.commands.report import check_outputs, deliver
from paralign.commands.terminal import progress, reading
from paralign.launch.torchrun import current_world

if TYPE_CHECKING:
    from paralign.align.verdict import Report


def align(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="K", help="Optimizer steps to compare; the same as align.steps."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="float64, float32 or bfloat16; the same as align.dtype."
        ),
    ] = None,
    world: World = None,
    shrink: Shrink = False,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what both runs recorded, for `paralign compare`."),
    ] = None,
    timeout: Timeout = "300",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Run a config on one device and in parallel, and compare them parameter by parameter.

    Starts the ranks on this machine, or joins those that torchrun started.

    Exit status: 0 aligned, 1 misaligned, 2 the config is wrong, 3 a rank failed
    or hung, 4 inconclusive.
    """
    check_not_both(quiet, verbose)
    seconds = parse_seconds("--timeout", timeout)
    changes = [
        *(overrides or ()),
        *([f"align.steps={steps}"] if steps is not None else []),
        *([f"align.dtype={dtype}"] if dtype is not None else []),
    ]
    run = load_run(config, changes, small=shrink, world=world, quiet=quiet)
    started = current_world()
    check_outputs(json=json, junit=junit, html=html)
    from paralign.prove.run import align as run_both  # imports torch: only for a sound config
    from paralign.train.data import prepare_data

    with reading(quiet=quiet, what="tokens") as report_bytes:
        prepare_data(run, report=report_bytes, verify=started is None or started.rank == 0)
    with progress(quiet=quiet or (started is not None and started.rank != 0)) as say:
        report: Report = run_both(run, trace=trace, timeout=seconds, progress=say)
    if started is not None and started.rank != 0:
        return report.exit_status  # one rank speaks for all; the verdict is the same on each
    return deliver(report, json=json, junit=junit, html=html, quiet=quiet, verbose=verbose)
