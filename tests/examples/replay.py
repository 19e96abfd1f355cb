"""Run an example's ``train`` on ranks, and hand its traces to the command line."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from paralign.cli import main
from paralign.testing import run_on_ranks

# Loaded machines are slow, not stuck: a world that hangs still ends long before the test run does.
TIMEOUT = 200


class Verdict(NamedTuple):
    """What a command said: its exit status and its JSON."""

    status: int
    report: dict[str, Any]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """All findings, first cause first."""
        found: list[dict[str, Any]] = self.report["findings"]
        return found

    @property
    def told(self) -> str:
        """Everything in short, for the message of a failing test."""
        lines = [f"exit {self.status}, {self.report['verdict']}: {self.report['why']}"]
        for each in self.findings:
            head = "/".join([each["component"], ",".join(each["axes"]), each["cause"]])
            lines.append(f"{head} {each['tensor']} {each['candidates']} {each['fix']}")
        return "\n".join(lines)


def record_reference(example: ModuleType, folder: Path) -> Path:
    """Train on this process alone and return the trace."""
    trace = folder / "reference"
    example.train(str(trace), reference=True)
    return trace


def record_parallel(
    example: ModuleType, world_size: int, folder: Path, name: str, **options: Any
) -> Path:
    """Train on ranks and return the trace."""
    trace = folder / name
    fn = functools.partial(example.train, str(trace), **options)
    run_on_ranks(fn, world_size, timeout=TIMEOUT)
    return trace


def compare(reference: Path, parallel: Path) -> Verdict:
    """Run ``paralign compare``."""
    return _command("compare", str(reference), str(parallel), parallel)


def inspect(parallel: Path) -> Verdict:
    """Run ``paralign inspect``."""
    return _command("inspect", str(parallel), None, parallel)


def _command(command: str, first: str, second: str | None, trace: Path) -> Verdict:
    file = trace.parent / f"{trace.name}.{command}.json"
    arguments = [command, first, *([] if second is None else [second]), "--json", str(file), "-q"]
    status = main(arguments)
    return Verdict(status, json.loads(file.read_text()))
