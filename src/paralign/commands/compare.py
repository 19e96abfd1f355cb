"""``paralign compare``: judges one recorded run by another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paralign.commands.options import (
    HtmlFile,
    JsonFile,
    JunitFile,
    Quiet,
    Verbose,
    check_not_both,
)
from paralign.commands.report import check_outputs, deliver


def compare(
    reference: Annotated[Path, typer.Argument(metavar="REF", help="Trace of the run to trust.")],
    parallel: Annotated[Path, typer.Argument(metavar="PAR", help="Trace of the run to judge.")],
    truth: Annotated[
        Path | None,
        typer.Option(
            metavar="REF64",
            help="Trace of the reference in float64: PAR may be no further from it than a small "
            "multiple of what REF is.",
        ),
    ] = None,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Compare two recorded runs, whoever made them and on whatever mesh.

    Exit status: 0 aligned, 1 misaligned, 2 a trace is wrong, 4 inconclusive.
    """
    check_not_both(quiet, verbose)
    check_outputs(json=json, junit=junit, html=html)
    from paralign.align.compare import compare as compare_traces  # imports torch

    report = compare_traces(reference, parallel, truth=truth)
    return deliver(report, json=json, junit=junit, html=html, quiet=quiet, verbose=verbose)
