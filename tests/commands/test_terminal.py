from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr

from rich.text import Text

from paralign.commands.terminal import print_error, print_result, progress, reading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LONG = "RUN.yaml:\n  - mesh.pp=0 must be a whole number of at least 1, and this goes on for long."


def test_an_error_is_wrapped_to_the_terminal_with_bullets_indented(monkeypatch):
    for name, value in (("COLUMNS", "60"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with redirect_stderr(stream):
        print_error(LONG)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain.splitlines() == [
        "error: RUN.yaml:",
        "  - mesh.pp=0 must be a whole number of at least 1, and this",
        "    goes on for long.",
    ]


def test_an_error_in_a_pipe_keeps_its_lines(capsys):
    print_error(LONG)
    assert capsys.readouterr().err == f"error: {LONG}\n"


def test_progress_is_silent_in_a_pipe_and_when_asked(capsys):
    for quiet in (True, False):
        with progress(quiet=quiet) as say:
            say("step 1")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")


def test_long_lines_are_not_cut_in_a_pipe(capsys):
    print_result(Text("x" * 500))
    assert capsys.readouterr().out == "x" * 500 + "\n"


def test_a_closed_pipe_is_no_error_and_keeps_the_status():
    script = (
        "import sys\nfrom rich.text import Text\n"
        "from paralign.commands.terminal import print_result\n"
        "for _ in range(1000): print_result(Text('x' * 1000))\n"
        "sys.exit(4)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.read(1)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait() == 4


def test_how_much_was_read_is_shown_on_a_terminal_and_only_when_there_is_something(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for is_quiet, sizes, shown in (
        (False, (1, 2), True),
        (True, (1, 2), False),
        (False, (), False),
    ):
        stream = Terminal()
        with redirect_stderr(stream), reading(quiet=is_quiet, what="tokens") as report:
            for size in sizes:
                report(size << 20, 2 << 20)
        assert ("tokens" in stream.getvalue()) is shown
        assert ("2.0/2.0 MiB" in stream.getvalue()) is shown


def test_nothing_is_shown_in_a_pipe(capsys):
    with reading(quiet=False, what="tokens") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""
