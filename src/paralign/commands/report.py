"""Delivers a result: as JSON, JUnit XML and a page where asked, and on the terminal.

Every command that judges goes through here: :func:`check_outputs` before anything runs, then
:func:`deliver` for a comparison or :func:`write_outputs` for many cases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from paralign.commands.files import check_writable, write_atomically
from paralign.commands.terminal import print_result
from paralign.errors import ConfigError

if TYPE_CHECKING:
    from paralign.align.report.case import CaseList
    from paralign.align.verdict import Report


def check_outputs(
    *, json: Path | None = None, junit: Path | None = None, html: Path | None = None
) -> None:
    """Refuse files that cannot be written, before anything has run.

    Raises:
        ConfigError: One of them is no place for a file, or two are the same file.
    """
    given: dict[Path, str] = {}
    for option, path in (("--json", json), ("--junit", junit), ("--report", html)):
        if path is None:
            continue
        check_writable(option, path)
        other = given.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(
                f"{other}={str(path)!r} and {option}={str(path)!r} are the same file. Give each "
                "its own."
            )


def deliver(
    report: Report,
    *,
    json: Path | None,
    quiet: bool,
    verbose: bool,
    junit: Path | None = None,
    html: Path | None = None,
) -> int:
    """Write and print ``report``, and return the exit status that it stands for."""
    from paralign.align.report.terminal import render

    write_outputs(report, report.to_json, json=json, junit=junit, html=html)
    if quiet:
        print_result(Text(f"{report.verdict}: {report.why}."))
    else:
        print_result(render(report, verbose=verbose))
    return report.exit_status


def write_outputs(
    result: Report | CaseList,
    to_json: Callable[[], str],
    *,
    json: Path | None,
    junit: Path | None,
    html: Path | None,
) -> None:
    """Write the files that were asked for, each whole or not at all.

    Args:
        result: A comparison, or the cases of a command that judges many runs.
        to_json: Makes what goes into ``json``.
        json: ``--json``.
        junit: ``--junit``.
        html: ``--report``.
    """
    if json is not None:
        write_atomically(json, to_json())
    if junit is not None:
        from paralign.align.report.junit import junit_of

        write_atomically(junit, junit_of(result))
    if html is not None:
        from paralign.align.report.html import html_of

        write_atomically(html, html_of(result))
