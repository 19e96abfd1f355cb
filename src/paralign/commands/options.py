"""Options that several commands share, with their words in ``--help``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from paralign.errors import ConfigError

ConfigFile = Annotated[
    Path, typer.Argument(metavar="RUN.yaml", help="The run; `paralign init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change one key of the config, as in `--set mesh.pp=2`. May be given many times.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the whole report as JSON.")
]
JunitFile = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the verdict as JUnit XML, for CI."),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write the report as one page, to open in a browser."
    ),
]
Timeout = Annotated[
    str, typer.Option(metavar="S", help="Seconds without progress after which a run has hung.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say more; show the Python traceback of an error."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the verdict.")]


def check_not_both(quiet: bool, verbose: bool) -> None:
    """Refuse ``-q`` together with ``-v``.

    Raises:
        ConfigError: Both are given.
    """
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose contradict each other. Give one of the two.")


def parse_seconds(option: str, text: str) -> float:
    """Read a length of time.

    Raises:
        ConfigError: It is no finite number above 0.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{option}={text!r} must be a number above 0. Give seconds, as in 300.")
    return seconds


def parse_count(option: str, text: str) -> int:
    """Read a number of things.

    Raises:
        ConfigError: It is no whole number of at least 1.
    """
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ConfigError(
            f"{option}={text!r} must be a whole number of at least 1. Give one, as in 8."
        )
    return int(text)
