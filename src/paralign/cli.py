"""The command line: which commands there are, and what becomes of an exception.

    exit 0  aligned / fine          exit 3  a rank failed or hung, or something unforeseen
    exit 1  misaligned              exit 4  inconclusive
    exit 2  config or arguments     exit 130  interrupted

An error is one paragraph on stderr, without a Python traceback unless ``-v``. Nothing here imports
torch; a command does so once its config is known to be sound.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, cast

import typer

import paralign
from paralign.commands.align import align
from paralign.commands.check import check
from paralign.commands.compare import compare
from paralign.commands.drill import drill
from paralign.commands.export import export
from paralign.commands.import_model import import_model
from paralign.commands.init import init
from paralign.commands.inspect import inspect
from paralign.commands.sweep import sweep
from paralign.commands.terminal import forget_stdout, print_error
from paralign.commands.train import train
from paralign.errors import ConfigError, ParalignError, RankError
from paralign.launch import patient_threads

_UNFORESEEN = 3
_INTERRUPTED = 130
# Some versions of typer bring their own click and others import it; this is the base of all wrong
# arguments in both.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paralign {paralign.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train over any mix of parallelism, and prove that it is the run on one device."""


def build_app() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="paralign",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (init, check, align, compare, inspect, drill, sweep, train, export):
        app.command()(command)
    app.command("import")(import_model)  # a keyword: no function can be called so
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None takes them from the process.
    """
    os.environ.update(patient_threads())  # before any command imports torch
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        return 0
    return status


def _run(arguments: list[str]) -> int:
    verbose = not {"-v", "--verbose"}.isdisjoint(arguments)
    try:
        status = build_app()(arguments, prog_name="paralign", standalone_mode=False)
    except _UsageError as error:
        print_error(_explain_usage(error))
        return ConfigError.exit_status
    except ParalignError as error:
        # Under torchrun every rank finds the same mistake in the config: one of them says so.
        if not (isinstance(error, ConfigError) and os.environ.get("RANK", "0") != "0"):
            _print_failure(str(error), error, verbose=verbose)
        return error.exit_status
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except (BrokenPipeError, SystemExit):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}. This was not foreseen."
        hint = "" if verbose else " Run it again with -v for the traceback."
        _print_failure(message + hint, error, verbose=verbose)
        return _UNFORESEEN
    if status == _INTERRUPTED:
        print_error("interrupted.")
    return int(status or 0)


def _explain_usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    command = context.command_path if context is not None else "paralign"
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end} See `{command} --help`."


def _print_failure(message: str, error: Exception, *, verbose: bool) -> None:
    print_error(message)
    if not verbose:
        return
    traceback.print_exception(error)
    if isinstance(error, RankError) and (remote := getattr(error, "traceback", None)):
        sys.stderr.write(f"\non the rank:\n{remote}\n")
