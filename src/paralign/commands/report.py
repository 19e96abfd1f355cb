"""Delivers a report: as JSON where asked, and on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from paralign.commands.files import write_atomically
from paralign.commands.terminal import print_result

if TYPE_CHECKING:
    from paralign.align.verdict import Report


def deliver(report: Report, *, json: Path | None, quiet: bool, verbose: bool) -> int:
    """Write and print ``report``, and return the exit status that it stands for."""
    from paralign.align.report.terminal import render

    if json is not None:
        write_atomically(json, report.to_json())
    if quiet:
        print_result(Text(f"{report.verdict}: {report.why}."))
    else:
        print_result(render(report, verbose=verbose))
    return report.exit_status
