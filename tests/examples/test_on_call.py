"""docs/on-call.md, followed literally: its commands run, and say what it says they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "on-call.md").read_text()
BLOCK = re.compile(r"```(bash|text)\n(.*?)```", re.DOTALL)
# Commands about the reader's own files; all others can be pasted.
THEIRS = "my_package"
# In the order of the page: two recordings, compare, inspect, a report, the mended run, compare.
STATUSES = [0, 0, 1, 1, 1, 0, 0]


def commands() -> list[tuple[str, str]]:
    """Return every command that can be pasted, and the output shown below it."""
    found: list[tuple[str, str]] = []
    for kind, text in BLOCK.findall(PAGE):
        if kind == "text":
            found[-1] = (found[-1][0], text)
        else:
            found += [(line, "") for line in text.splitlines() if THEIRS not in line]
    return found


def sentences(shown: str) -> list[str]:
    """Return what an output says, without what differs from run to run and machine to machine."""
    joined = " ".join(shown.partition("\n")[2].split())  # without the line of numbers
    parts = re.split(r"(?<=[.:])\s|\s\|\s|\(", joined)
    return [
        part for part in parts if len(part.split()) > 3 and "/" not in part and "eps" not in part
    ]


def test_page_has_every_step():
    assert len(commands()) == len(STATUSES)
    assert sum(bool(shown) for _, shown in commands()) == 2
    assert all(len(sentences(shown)) >= 3 for _, shown in commands() if shown)


def test_pages_it_leads_to_exist():
    for target in re.findall(r"\]\(([\w.-]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target


@pytest.mark.long
@pytest.mark.ranks
def test_commands_lead_from_the_difference_to_the_finding(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    for (command, shown), status in zip(commands(), STATUSES, strict=True):
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        said = " ".join(done.stdout.split())
        for sentence in sentences(shown):
            assert sentence in said, f"{command}\nsays no longer: {sentence}\n{done.stdout}"
    assert (tmp_path / "report.html").stat().st_size > 0
