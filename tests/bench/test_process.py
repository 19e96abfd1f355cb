from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A child that ends at once, and leaves behind a process that works for half a second.
ORPHAN = """
import os, time
if os.fork() == 0:
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
"""


def run_elsewhere(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Not in this process: the measurement adopts orphans and waits for all children.
    code = f"from bench._process import run; print(run({command!r}, limit=60).cpu_seconds)"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_the_processor_time_of_orphans_counts():
    done = run_elsewhere([sys.executable, "-S", "-c", ORPHAN])
    assert 0.5 <= float(done.stdout) < 2.0


def test_a_command_that_fails_is_an_error_with_its_output():
    done = run_elsewhere(["sh", "-c", "echo why it failed >&2; exit 3"])
    assert done.returncode == 1
    assert "ended with 3:\nwhy it failed" in done.stderr
