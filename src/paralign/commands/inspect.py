"""``paralign inspect``: what one recorded run betrays by itself, without a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paralign.commands.options import (
    HtmlFile,
    JsonFile,
    JunitFile,
    Quiet,
    Verbose,
    check_not_both,
)
from paralign.commands.report import check_outputs, write_outputs
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
    junit: JunitFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Look for contradictions within one recorded run; no reference is needed.

    Exit status: 0 nothing found, 1 findings, 2 the trace is wrong, 4 nothing
    could be told.
    """
    check_not_both(quiet, verbose)
    check_outputs(json=json, junit=junit, html=html)
    from paralign.align.inspect import inspect as inspect_trace  # imports torch
    from paralign.align.report.inspection import cases_of, render

    report = inspect_trace(parallel, unused=unused or ())
    write_outputs(cases_of(report), report.to_json, json=json, junit=junit, html=html)
    if quiet:
        print_result(Text(f"{report.verdict}: {report.why}."))
    else:
        print_result(render(report, verbose=verbose))
    return report.exit_status
