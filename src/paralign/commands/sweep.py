"""``paralign sweep``: judges every mesh and schedule of a number of ranks, as a matrix."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paralign.commands.chosen import Shrink, load_run
from paralign.commands.files import write_atomically
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
    parse_count,
    parse_seconds,
)
from paralign.commands.report import check_outputs, write_outputs
from paralign.commands.terminal import print_result, progress
from paralign.config.nearest import suggest
from paralign.errors import ConfigError
from paralign.launch.torchrun import current_world

if TYPE_CHECKING:
    from paralign.config.run import RunConfig
    from paralign.prove.sweep import CellResult, SweepReport

SUBSETS = ("full", "pairs")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def sweep(
    config: ConfigFile,
    world: Annotated[
        str, typer.Option("--world", metavar="N", help="Number of ranks of every mesh.")
    ],
    overrides: Overrides = None,
    shrink: Shrink = False,
    subset: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="full, or pairs: few cells in which every pair of settings occurs.",
        ),
    ] = "full",
    budget: Annotated[
        str | None,
        typer.Option(metavar="T", help="Begin no further cell after this time: 90s, 10m, 2h."),
    ] = None,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with what the --json file holds from an earlier try."),
    ] = False,
    timeout: Timeout = "300",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Judge every legal mesh and schedule of N ranks against one device.

    The --json file is written after every cell, so that --resume can go on from it.

    Exit status: 0 all that ran are aligned, 1 one is misaligned, 2 the config is wrong, 3 one
    failed or hung, 4 one is inconclusive.
    """
    check_not_both(quiet, verbose)
    seconds, world_size = parse_seconds("--timeout", timeout), parse_count("--world", world)
    limit = None if budget is None else parse_duration("--budget", budget)
    if subset not in SUBSETS:
        raise ConfigError(f"--subset={subset!r} is no subset. {suggest(subset, SUBSETS)}")
    if (started := current_world()) is not None:
        raise ConfigError(
            f"world size {started.world_size} was started by torchrun, but sweep starts its own "
            "ranks on this machine. Run it without torchrun."
        )
    if resume and json is None:
        raise ConfigError("--resume needs the file to go on from. Give it with --json FILE.")
    # The copy's own mesh is not asked for: every mesh of N ranks is tried.
    run = load_run(config, overrides or (), small=shrink, world=None, quiet=quiet)
    check_outputs(json=json, junit=junit, html=html)
    from paralign.commands.sweep_cases import cases_of_sweep  # these import torch
    from paralign.commands.sweep_table import render
    from paralign.prove.sweep import sweep as run_sweep

    earlier = _earlier(json, run, world_size) if resume and json is not None else []

    def keep(report: SweepReport) -> None:
        if json is not None:
            write_atomically(json, report.to_json())

    with progress(quiet=quiet) as say:
        report = run_sweep(
            run,
            world_size,
            subset=subset,
            budget=limit,
            earlier=earlier,
            keep=keep,
            timeout=seconds,
            progress=say,
        )
    write_outputs(cases_of_sweep(report), report.to_json, json=json, junit=junit, html=html)
    print_result(render(report, quiet=quiet, verbose=verbose))
    return report.exit_status


def _earlier(json: Path, run: RunConfig, world_size: int) -> list[CellResult]:
    from paralign.prove.sweep import read_results

    if not json.exists():
        return []
    try:
        return read_results(json.read_text(encoding="utf-8"), run, world_size)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json={str(json)!r}: {error}") from None


def parse_duration(option: str, text: str) -> float:
    """Read a length of time such as ``90s``, ``10m`` or ``2h``; a bare number is seconds.

    Raises:
        ConfigError: It is no such length of time above 0.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not seconds > 0:
        raise ConfigError(
            f"{option}={text!r} must be a length of time above 0. Give one, as in 90s, 10m or 2h."
        )
    return seconds
