"""``paralign compare``: judges one recorded run by another."""

from __future__ import annotations

from collections.abc import Sequence
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
from paralign.errors import ConfigError


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
    noise: Annotated[
        Path | None,
        typer.Option(
            metavar="REF2",
            help="Trace of a second run of the reference, perturbed by an eps or with its sums in "
            "another order: PAR may be no further from REF than a small multiple of what REF2 is.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW",
            help="What PAR calls OLD is what REF calls NEW, where content does not tell; * stands "
            "for any text. May be given several times.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PKG.MOD:BUILD",
            help="build() -> the model as it runs on one device. Where module outputs were "
            "recorded, it is run with what PAR computed before each module, to name those that are "
            "wrong by themselves.",
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
    from paralign.models.own import load_symbol

    report = compare_traces(
        reference,
        parallel,
        truth=truth,
        noise=noise,
        model=None if model is None else load_symbol(model, key="--model"),
        names=_names(rename or ()),
    )
    return deliver(report, json=json, junit=junit, html=html, quiet=quiet, verbose=verbose)


def _names(renames: Sequence[str]) -> dict[str, str] | None:
    """Turn ``OLD=NEW`` into a table.

    Raises:
        ConfigError: One of them is not of this form, or a name is given twice; all are listed.
    """
    names: dict[str, str] = {}
    problems = []
    for text in renames:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            problems.append(f"--rename {text!r} is not OLD=NEW")
        elif names.setdefault(old, new) != new:
            problems.append(f"--rename gives {old!r} two names: {names[old]!r} and {new!r}")
    if problems:
        raise ConfigError.from_problems("cannot rename", problems)
    return names or None
