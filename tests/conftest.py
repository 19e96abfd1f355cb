"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from paralign.launch import patient_threads, start_fork_server

os.environ.update(patient_threads())  # before a test imports torch

# No example database: tests write nothing outside tmp_path. No deadline: two busy cores are slow.
settings.register_profile("paralign", database=None, deadline=None)
settings.load_profile("paralign")


# Ranks are forked with these imported. Without it each of them would import them: a third of the
# time of a small run.
PRELOADED = (
    "pytest",
    "tests.parity",
    "paralign.prove.run",
    "paralign.prove.drill_ranks",
    "paralign.train.loop",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the fork server, or another one, before a test does, which names less or nothing."""
    if item.get_closest_marker("ranks"):
        start_fork_server(*PRELOADED)
