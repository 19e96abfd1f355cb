"""What a command says on the terminal: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

_PIPE_WIDTH = 140
# In an error: what was given stands out, and so does what to do about it.
_GIVEN = re.compile(r"[\w.-]+=(?:'[^']*'|\[[^\]]*\]|[^\s,;:()]+(?<!\.))")
_FIX = re.compile(
    r"(?:Did you mean|Use|Write|Give|Remove|Keep|Name|List|Leave|Start|Make) [^\n]*$", re.M
)


def print_result(renderable: RenderableType) -> None:
    """Print to stdout. A reader that has gone away, such as ``head``, is no error."""
    # A file or a pipe has no width: give tables room, instead of the 80 columns that rich assumes.
    unbounded = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(soft_wrap=unbounded, width=_PIPE_WIDTH if unbounded else None)
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
    console = Console(stderr=True, highlight=False)
    text = f"error: {message.strip()}"
    if console.is_terminal:
        text = "\n".join(_wrap(line, console.width) for line in text.splitlines())
    styled = Text(text)
    styled.highlight_regex(_FIX, "green")
    styled.highlight_regex(_GIVEN, "bold")
    styled.stylize("bold red", 0, len("error:"))
    console.print(styled, soft_wrap=True)


def _wrap(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
        yield lambda text: status.update(text)
