"""What a command says on the terminal: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_PIPE_WIDTH = 140
# In an error, what was given stands out, and so does what to do about it.
_LIST = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_GIVEN = re.compile(rf"(?:[\w.-]+=(?:'[^']*'|{_LIST}|\{{[^{{}}]*\}}|[^\s,;:()]+(?<!\.)))")
_KEY = re.compile(r"(?<=^  - )[\w.]+(?=:)")
_FIX = re.compile(
    r"(?<=[.:?] )(?:Did you mean|Use|Write|Give|Remove|Keep|Name|List|Leave|Start|Make)\b.*"
)


def print_result(renderable: RenderableType) -> None:
    """Print to stdout. A reader that has gone away, such as ``head``, is no error."""
    # A file or a pipe has no width: give tables room, instead of the 80 columns that rich assumes.
    unbounded = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(
        soft_wrap=unbounded, width=_PIPE_WIDTH if unbounded else None, highlight=False
    )
    try:
        console.print(renderable)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns a broken pipe into SystemExit
        forget_stdout()


def forget_stdout() -> None:
    """Send the rest of stdout nowhere, so that Python's own flush at the end does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_error(message: str) -> None:
    """Print one paragraph to stderr, wrapped to the terminal where it is one."""
    _print_message("error:", "bold red", message)


def print_notice(message: str) -> None:
    """Print to stderr what is right but not what a name promises."""
    _print_message("notice:", "bold yellow", message)


def _print_message(title: str, style: str, message: str) -> None:
    console = Console(stderr=True, highlight=False)
    for line in f"{title} {message.strip()}".splitlines():
        styled = Text(line)
        styled.highlight_regex(_FIX, "green")
        styled.highlight_regex(_GIVEN, "bold")
        styled.highlight_regex(_KEY, "bold")
        styled.highlight_regex(f"^{title}", style)
        for piece in _wrap(styled, console):
            console.print(piece, soft_wrap=True)


def _wrap(line: Text, console: Console) -> list[Text]:
    """Cut ``line`` at the terminal's width, what follows a bullet below its text."""
    if not console.is_terminal:
        return [line]
    margin = len(line.plain) - len(line.plain.lstrip(" -"))
    first, rest = line[:margin], line[margin:]
    pieces = rest.wrap(console, console.width - margin)
    return [(Text(" " * margin) if at else first) + piece for at, piece in enumerate(pieces)]


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on stderr and only on a terminal, for as long as the block runs.

    Yields:
        A function that says what has begun.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))  # names in it are not markup


@contextmanager
def reading(*, quiet: bool, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a long text has been read, on stderr and only on a terminal.

    Args:
        quiet: Show nothing.
        what: What is being made of it.

    Yields:
        A function that is told how many bytes of how many have been read.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        shown: list[tuple[Progress, TaskID]] = []  # from the first report on: there may be none

        def show(done: int, total: int) -> None:
            if not shown:
                bar = stack.enter_context(Progress(*columns, console=console, transient=True))
                shown.append((bar, bar.add_task(what, total=total)))
            [(bar, task)] = shown
            bar.update(task, completed=done, total=total)

        yield show
