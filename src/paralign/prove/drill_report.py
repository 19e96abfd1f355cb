"""The result of a drill: what was broken, what was found, and whether that is right."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paralign.errors import ParalignError
from paralign.prove.fault import Fault

if TYPE_CHECKING:
    from paralign.align.verdict import Finding, Report

SCHEMA = 1
ALIGNED = "aligned"


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """One fault and what became of it.

    Attributes:
        fault: What was broken.
        report: The verdict on the broken run; None: it did not come to its end.
        error: What ended it.
        inert: Every recorded number is the clean run's to the last bit, so there is nothing to
            catch.
        separated_by: The run that was made to tell candidates apart, and what it said.
    """

    fault: Fault
    report: Report | None = None
    error: ParalignError | None = None
    inert: bool = False
    separated_by: str | None = None

    @property
    def findings(self) -> list[Finding]:
        """What was found, the most telling first."""
        return [] if self.report is None else self.report.findings

    @property
    def caught(self) -> bool:
        """Whether the broken run was told from a right one."""
        if self.inert:
            return False
        return self.report is None or self.report.verdict != ALIGNED

    @property
    def component_right(self) -> bool:
        """Whether the first finding names the component, or lists it as a candidate."""
        from paralign.align.explain.candidates import meanings

        named = meanings(self.findings[0]) if self.findings else []
        return any(meaning.component == self.fault.component for meaning in named)

    @property
    def place_right(self) -> bool:
        """Whether the first finding names component and axes, or lists them as a candidate.

        A candidate counts only where the finding says which run would decide.
        """
        from paralign.align.explain import names_place

        fault = self.fault
        return bool(self.findings) and names_place(self.findings[0], fault.component, fault.axes)

    @property
    def cause_right(self) -> bool:
        """Whether the first finding names the cause at that place, or lists it likewise."""
        from paralign.align.explain import names_cause

        fault = self.fault
        return bool(self.findings) and names_cause(
            self.findings[0], fault.component, fault.axes, fault.cause
        )

    @property
    def word(self) -> str:
        """One word: inert, missed, right, mislocated (component or axes) or misnamed (cause)."""
        if self.inert:
            return "inert"
        if not self.caught:
            return "missed"
        if not self.place_right:
            return "mislocated"
        return "right" if self.cause_right else "misnamed"

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as the report stores it."""
        return {
            "name": self.fault.name,
            "breaks": self.fault.description,
            "inert": self.inert,
            "caught": self.caught,
            "expected": {
                "component": self.fault.component,
                "axes": sorted(self.fault.axes),
                "cause": self.fault.cause,
            },
            "verdict": None if self.report is None else self.report.verdict,
            "error": None if self.error is None else str(self.error),
            "findings": [] if self.report is None else self.report.to_dict()["findings"],
            "separated_by": self.separated_by,
            "correct": {
                "component": self.component_right,
                "axes": self.place_right,
                "cause": self.cause_right,
            },
        }


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """All outcomes of one config."""

    config: Any
    mesh: dict[str, int]
    dtype: str
    clean: Report
    outcomes: list[FaultOutcome]
    skipped: list[tuple[str, list[str]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def active(self) -> list[FaultOutcome]:
        """The outcomes of faults that changed a number."""
        return [outcome for outcome in self.outcomes if not outcome.inert]

    @property
    def summary(self) -> dict[str, int]:
        """How many faults there were, and how many of those that changed a number were caught."""
        active = self.active
        return {
            "faults": len(self.outcomes),
            "inert": len(self.outcomes) - len(active),
            "active": len(active),
            "caught": sum(o.caught for o in active),
            "component_and_axes": sum(o.place_right for o in active),
            "cause": sum(o.cause_right for o in active),
            "right": sum(o.word == "right" for o in active),
        }

    @property
    def exit_status(self) -> int:
        """0: the clean run is aligned and every active fault is caught; 1: not."""
        numbers = self.summary
        is_clean = self.clean.verdict == ALIGNED
        return 0 if is_clean and numbers["caught"] == numbers["active"] else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "schema": SCHEMA,
            "config": self.config,
            "mesh": self.mesh,
            "dtype": self.dtype,
            "drill": {
                "clean": {"verdict": self.clean.verdict, "why": self.clean.why},
                "faults": [outcome.to_dict() for outcome in self.outcomes],
                "skipped": [{"name": name, "lacks": lacks} for name, lacks in self.skipped],
                "summary": self.summary,
            },
            "timings": {"total_s": self.seconds},
        }

    def to_json(self) -> str:
        """Return the report as a JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)
