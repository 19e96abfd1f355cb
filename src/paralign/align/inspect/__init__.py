"""What one trace alone betrays, without a reference: one file per kind of contradiction."""

from paralign.align.inspect.report import InspectReport
from paralign.align.inspect.run import inspect

__all__ = ["InspectReport", "inspect"]
