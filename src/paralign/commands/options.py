"""Options that several commands share, with their words in ``--help``."""

from __future__ import annotations

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
