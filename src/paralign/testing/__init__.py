"""Helpers for tests of parallel code, public and kept stable."""

from paralign.testing.ranks import run_on_ranks

__all__ = ["run_on_ranks"]
