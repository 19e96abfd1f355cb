"""The result of a comparison as values, and as JSON (``schema/report.schema.json``)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1

ALIGNED = "aligned"
MISALIGNED = "misaligned"
INCONCLUSIVE = "inconclusive"

_EXIT_STATUS = {ALIGNED: 0, MISALIGNED: 1, INCONCLUSIVE: 4}

ORDINARY = "ordinary"
ZERO_IN_THEORY = "zero_in_theory"
EXACT = "exact"
DISCRETE = "discrete"


@dataclass
class TensorRow:
    """One compared tensor (or loss, norm, token count) at one step."""

    kind: str
    name: str
    step: int
    rel_l2: float
    """Frobenius norm of the error over that of the reference; of the truth where one is given."""
    eps: float
    """In eps of the compute dtype; for ``zero_in_theory``, of the global gradient norm as well."""
    budget_eps: float | None
    """What ``eps`` may be; None: listed, not gated."""
    cosine: float | None
    scale: float | None
    worst_index: tuple[int, ...] | None
    ok: bool
    paired_by: str | None = "placement"
    state: str | None = None
    """Name of the optimizer state, for moments."""
    category: str = ORDINARY
    worst_values: tuple[float, float] | None = None
    """The worst element on the reference's (or truth's) side and on the parallel side."""
    ranks_off: list[int] = field(default_factory=list)
    """Ranks whose own part is out of budget."""
    share_beyond: float = 0.0
    """Share of elements that ``allclose`` with 2e-3 would have refused."""
    profile: dict[str, Any] | None = None
    """Where in the tensor the error sits; of failing tensors (``error_profile.py``)."""

    @property
    def label(self) -> str:
        """The name as people read it, with the optimizer state."""
        return f"{self.name} [{self.state}]" if self.state else self.name

    @property
    def strain(self) -> float:
        """How much of its budget is used: above 1 is out. NaN counts as infinite, ungated as 0."""
        if self.budget_eps is None:
            return 0.0
        if math.isnan(self.eps):
            return math.inf
        if self.budget_eps == 0.0:
            return 0.0 if self.ok else math.inf
        return self.eps / self.budget_eps

    def to_dict(self) -> dict[str, Any]:
        """Return the row as the report stores it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "step": self.step,
            "rel_l2": self.rel_l2,
            "eps": self.eps,
            "budget_eps": self.budget_eps,
            "cosine": self.cosine,
            "scale": self.scale,
            "worst_index": None if self.worst_index is None else list(self.worst_index),
            "paired_by": self.paired_by,
            "ok": self.ok,
            "state": self.state,
            "category": self.category,
            "worst_values": None if self.worst_values is None else list(self.worst_values),
            "ranks_off": self.ranks_off,
            "share_beyond": self.share_beyond,
            "profile": self.profile,
        }


@dataclass
class RouterRow:
    """The choices of one router at one step, as the run itself would have made them."""

    name: str
    step: int
    choices: int
    flipped: int
    """Choices that are not the reference's."""
    allowed: float
    """How many may differ: none in float64, below it what rounding explains."""
    eps: float
    """Distance of the scores that experts are selected by from the truth's, as of tensors."""
    budget_eps: float | None
    """None: not gated, as in float64, where tokens go where they choose, and what follows shows."""
    ok: bool
    ranks_off: list[int] = field(default_factory=list)
    """Ranks whose own tokens are out of either budget."""

    @property
    def is_flipped_only(self) -> bool:
        """Whether scores are within budget, so that the selection itself must differ."""
        return self.budget_eps is None or self.eps <= self.budget_eps


@dataclass
class Routing:
    """Router choices: discrete, so counted by themselves."""

    replayed: bool
    """Whether tokens were sent by the reference's choices, in this run and in the truth."""
    routers: list[RouterRow]

    @property
    def choices(self) -> int:
        """All choices of the run."""
        return sum(row.choices for row in self.routers)

    @property
    def flipped(self) -> int:
        """Those that the run would have made otherwise."""
        return sum(row.flipped for row in self.routers)

    @property
    def failing(self) -> list[RouterRow]:
        """Routers out of budget, in the order of steps and layers."""
        return [row for row in self.routers if not row.ok]

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report stores it."""
        return {
            "replayed": self.replayed,
            "choices": self.choices,
            "flipped": self.flipped,
            "routers": [asdict(row) for row in self.routers],
        }


@dataclass
class Finding:
    """One thing that is wrong, with the numbers that say so."""

    component: str
    cause: str
    fix: str
    tensor: str | None = None
    axes: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    where: dict[str, Any] | None = None
    candidates: list[str] = field(default_factory=list)
    """What the numbers cannot tell apart."""
    separate_by: str | None = None
    """The run that would tell the candidates apart."""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as the report stores it."""
        return {
            "component": self.component,
            "axes": self.axes,
            "cause": self.cause,
            "tensor": self.tensor,
            "evidence": self.evidence,
            "fix": self.fix,
            "where": self.where,
            "candidates": self.candidates,
            "separate_by": self.separate_by,
        }


@dataclass
class Coverage:
    """What was compared, and what was not."""

    parameters: int = 0
    compared: int = 0
    elements: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    paired: dict[str, int] = field(
        default_factory=lambda: {"placement": 0, "content": 0, "position": 0, "rule": 0}
    )
    paths: list[str] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether nothing was left out."""
        return not self.skipped

    def to_dict(self) -> dict[str, Any]:
        """Return the coverage as the report stores it."""
        return {
            "parameters": self.parameters,
            "compared": self.compared,
            "elements": self.elements,
            "skipped": self.skipped,
            "paired": self.paired,
            "paths": self.paths,
        }


@dataclass
class Report:
    """Whether two runs are the same training run, and the numbers behind it."""

    verdict: str
    why: str
    dtype: str
    yardstick: str
    config: Any = None
    mesh: dict[str, int] = field(default_factory=dict)
    loss: dict[str, float] | None = None
    coverage: Coverage = field(default_factory=Coverage)
    worst: TensorRow | None = None
    tensors: list[TensorRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Differences that do not matter by themselves: versions, micro-batches."""
    timings: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per side what the run said about itself: ``reference`` and ``parallel``."""
    located: dict[str, Any] | None = None
    """Where the runs part, see ``locate``: the first ``kind``, ``name`` and ``step`` out of budget,
    and what is wrong by itself (``isolated``)."""
    routing: Routing | None = None
    """Choices of routers; None: there were none, or they were not recorded."""

    @property
    def exit_status(self) -> int:
        """0 aligned, 1 misaligned, 4 inconclusive."""
        return _EXIT_STATUS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; numbers that JSON lacks become their names."""
        worst = self.worst
        content = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "why": self.why,
            "config": self.config,
            "mesh": self.mesh,
            "dtype": self.dtype,
            "yardstick": self.yardstick,
            "loss": self.loss,
            "coverage": self.coverage.to_dict(),
            "worst": None
            if worst is None
            else {
                "kind": worst.kind,
                "name": worst.label,
                "rel_l2": worst.rel_l2,
                "eps": worst.eps,
            },
            "tensors": [row.to_dict() for row in self.tensors],
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": self.notes,
            "timings": self.timings,
            "facts": self.facts,
            "located": self.located,
            "routing": None if self.routing is None else self.routing.to_dict(),
        }
        plain: dict[str, Any] = plain_json(content)
        return plain

    def to_json(self) -> str:
        """Return the report as a JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def plain_json(value: Any) -> Any:
    """Return ``value`` with the names of the numbers that JSON lacks, and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value
