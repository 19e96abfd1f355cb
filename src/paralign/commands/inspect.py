"""``paralign inspect``: what one recorded run betrays by itself, without a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paralign.commands.files import check_writable, write_atomically
from paralign.commands.options import JsonFile, Quiet, Verbose, check_not_both
from paralign.commands.terminal import print_result


def inspect(
    parallel: Annotated[Path, typer.Argument(metavar="PAR", help="Trace of the run to inspect.")],
    unused: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Parameters that the model does not use, as in `*.spare.*`: they may have no "
            "gradient. May be given many times.",
        ),
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Look for contradictions within one recorded run; no reference is needed.

    Exit status: 0 nothing found, 1 findings, 2 the trace is wrong, 4 nothing
    could be told.
    """
    check_not_both(quiet, verbose)
    if json is not None:
        check_writable("--json", json)
    from paralign.align.inspect import inspect as inspect_trace  # imports torch
    from paralign.align.report.inspection import render

    report = inspect_trace(parallel, unused=unused or ())
    if json is not None:
        write_atomically(json, report.to_json())
    if quiet:
        print_result(Text(f"{report.verdict}: {report.why}."))
    else:
        print_result(render(report, verbose=verbose))
    return report.exit_status
