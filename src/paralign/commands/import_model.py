"""``paralign import``: a published model as a seed checkpoint, with a RUN.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paralign.commands.files import write_atomically
from paralign.commands.options import Quiet, Verbose, check_not_both
from paralign.commands.terminal import print_result
from paralign.config.template import render


def import_model(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder with config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Write a published model as a seed checkpoint, with a RUN.yaml.

    Reads llama, mixtral and deepseek_v3 models in the form of the transformers
    library, and refuses what paralign would compute otherwise. Starts no rank.
    """
    check_not_both(quiet, verbose)
    from paralign.train.published import import_published

    config = import_published(source, out)
    page = out / "RUN.yaml"
    write_atomically(page, render(config, title=f"A run that starts from {source}."))
    if not quiet:
        print_result(Text(f"wrote {out}; next: paralign check {page}"))
    return 0
