"""Delivers a report: as JSON where asked, and on the terminal."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

from paralign.commands.files import write_atomically
from paralign.commands.terminal import print_result

if TYPE_CHECKING:
    from paralign.align.report.model import Report


def deliver(report: Report, *, json: Path | None, quiet: bool, verbose: bool) -> int:
    """Write and print ``report``, and return the exit status that it stands for."""
    from paralign.align.report.terminal import render

    if json is not None:
        write_atomically(json, json_format.dumps(report.to_json(), indent=2) + "\n")
    print_result(render(report, quiet=quiet, verbose=verbose))
    return report.exit_status
