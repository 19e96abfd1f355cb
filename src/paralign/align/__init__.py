"""Record a training run, compare two of them: works on runs that paralign did not start."""

from paralign.align.compare import compare
from paralign.align.record import record
from paralign.align.recorder import Recorder
from paralign.align.verdict import Report

__all__ = ["Recorder", "Report", "compare", "record"]
