"""``paralign export``: a checkpoint as a published model, for tools that read those."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from paralign.commands.options import Quiet, Verbose, check_not_both
from paralign.commands.terminal import print_result


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or the folder of a run: its newest one."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16"] | None,
        typer.Option(help="Of the tensors; as they were saved, if not given."),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Write a checkpoint's weights as config.json and safetensors.

    In the form of the transformers library: llama, mixtral and deepseek_v3.
    What that form cannot say is refused by name. Starts no rank.
    """
    check_not_both(quiet, verbose)
    import torch

    from paralign.train.published import export_checkpoint

    chosen = None if dtype is None else getattr(torch, dtype)
    text = export_checkpoint(checkpoint, out, dtype=chosen)
    if not quiet:
        print_result(Text(f"wrote {out}: {text}"))
    return 0
