"""The result of an inspection as values, and as JSON (``schema/inspect.schema.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from paralign.align.verdict import Finding, plain_json

SCHEMA = 1

CLEAN = "clean"
FINDINGS = "findings"
INCONCLUSIVE = "inconclusive"

_EXIT_STATUS = {CLEAN: 0, FINDINGS: 1, INCONCLUSIVE: 4}


@dataclass
class Check:
    """What one check looked at, and what it saw."""

    name: str
    looked_at: int = 0
    """Number of things it could judge; 0: it could tell nothing."""
    why_not: str | None = None
    """Why it could not judge anything, or not everything."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the check as the report stores it; its findings are stored with all others."""
        return {
            "name": self.name,
            "looked_at": self.looked_at,
            "findings": len(self.findings),
            "why_not": self.why_not,
        }


@dataclass
class InspectReport:
    """Whether a trace contradicts itself, and where."""

    verdict: str
    why: str
    trace: str
    world_size: int
    dtype: str
    mesh: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        """0 nothing found, 1 findings, 4 nothing could be told."""
        return _EXIT_STATUS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; numbers that JSON lacks become their names."""
        plain: dict[str, Any] = plain_json(
            {
                "schema": SCHEMA,
                "verdict": self.verdict,
                "why": self.why,
                "trace": self.trace,
                "world_size": self.world_size,
                "dtype": self.dtype,
                "mesh": self.mesh,
                "findings": [finding.to_dict() for finding in self.findings],
                "checks": [check.to_dict() for check in self.checks],
                "notes": self.notes,
                "timings": self.timings,
            }
        )
        return plain

    def to_json(self) -> str:
        """Return the report as a JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)
