"""The support table: which plans run as asked, which are repaired, which are refused, and why.

Pure: nothing here needs torch. ``paralign check`` prints what :func:`rules` returns,
``parallelize`` obeys it, and ``tests/parallel/test_support.py`` shows on real ranks that what is
refused or repaired would be wrong, and that what is repaired is right. Each row's reason is
measured; ``docs/engine.md`` has a reproduction for those that are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from paralign.errors import ScheduleError
from paralign.parallel.stages import Placement, ScheduleKind, default_stages_per_rank, find_schedule

WRAP_NAMES = ("root", "blocks", "first_block")
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the support table looks at. All of it is known before a rank starts."""

    schedule: str = "GPipe"
    num_microbatches: int = 1
    pp: int = 1
    stages_per_rank: int | None = None  # None: 1, or 2 for a schedule with virtual stages
    num_layers: int | None = None  # None: not known yet
    layers_per_stage: Sequence[int] | None = None
    wrap: str | Sequence[Sequence[str]] = "blocks"
    reshard_after_forward: bool | None = None  # None: torch's default
    has_expert_units: bool = False  # experts over ep are units beside those of wrap
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"
    loss_chunks: int = 1
    recomputes: bool = False  # layers or parts of them, in the backward pass
    compiles: bool = False  # each layer

    @property
    def kind(self) -> ScheduleKind:
        """The schedule's fixed properties."""
        return find_schedule(self.schedule)

    @property
    def num_stages_per_rank(self) -> int:
        """Stages a rank runs, resolved."""
        given = self.stages_per_rank
        return default_stages_per_rank(self.kind) if given is None else given

    @property
    def num_stages(self) -> int:
        """Stages in the whole pipeline."""
        return self.pp * self.num_stages_per_rank

    @property
    def loss_recomputations(self) -> int:
        """Times, at most, that a chunk of the loss is computed once more in the backward pass."""
        if self.loss_chunks == 1:
            return 0
        return 2 if self.kind.zero_bubble else 1


class Decision(Enum):
    """What happens to a plan that a rule applies to."""

    RUN = "run"
    REPAIR = "repair"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the support table that applies to a plan."""

    decision: Decision
    name: str
    reason: str
    fix: str  # the repair that is made, or the nearest plan that works


def rules(plan: Plan) -> list[Rule]:
    """Return every row of the support table that applies to ``plan``, refusals first.

    Raises:
        ScheduleError: The schedule's name is unknown.
    """
    found = [*_micro_batches(plan), *_stages(plan), *_units(plan), *_zero_bubble(plan)]
    order = [Decision.REFUSE, Decision.REPAIR, Decision.RUN]
    return sorted(found, key=lambda rule: order.index(rule.decision))


def problems(plan: Plan) -> list[str]:
    """Return why ``plan`` is refused, one sentence each; empty when it runs."""
    try:
        found = rules(plan)
    except ScheduleError as error:
        return [str(error)]
    return [f"{rule.reason} {rule.fix}" for rule in found if rule.decision is Decision.REFUSE]


def resolve_reshard(plan: Plan) -> bool | None:
    """Return the ``reshard_after_forward`` to use, after repairs."""
    repaired = any(rule.decision is Decision.REPAIR for rule in rules(plan))
    return False if repaired else plan.reshard_after_forward


def _refuse(name: str, reason: str, fix: str) -> Rule:
    return Rule(decision=Decision.REFUSE, name=name, reason=reason, fix=fix)


def _micro_batches(plan: Plan) -> Iterator[Rule]:
    kind, m, pp = plan.kind, plan.num_microbatches, plan.pp
    if m < 1:
        yield _refuse(
            "micro-batches", f"num_microbatches={m} must be at least 1.", "Use 1 or more."
        )
        return
    least = {"1F1B": pp, "DualPipeV": 2 * pp}.get(kind.name, 1)
    if m < least:
        rule = "2 * pp" if kind.name == "DualPipeV" else "pp"
        yield _refuse(
            "micro-batches",
            f"num_microbatches={m} is too few for {kind.name} over axis 'pp' ({pp} ranks): it "
            f"needs at least {rule} = {least}.",
            f"Use num_microbatches={least}, or schedule GPipe.",
        )
    rounds = max(1, m // pp)
    if kind.name in ("Interleaved1F1B", "InterleavedZeroBubble") and m % rounds:
        legal = [n for n in range(1, 4 * max(m, pp) + 1) if n % max(1, n // pp) == 0]
        below, above = max(n for n in legal if n < m), min(n for n in legal if n > m)
        yield _refuse(
            "micro-batches",
            f"num_microbatches={m} does not divide into {rounds} equal rounds, which {kind.name} "
            f"needs over axis 'pp' ({pp} ranks, {m} // {pp} = {rounds} rounds).",
            f"Use num_microbatches={below} or {above}.",
        )


def _stages(plan: Plan) -> Iterator[Rule]:
    kind, per_rank = plan.kind, plan.num_stages_per_rank
    if kind.placement is Placement.SINGLE and per_rank != 1:
        yield _refuse(
            "stages",
            f"stages_per_rank={per_rank} does not fit {kind.name}, which runs one stage a rank.",
            "Use stages_per_rank=1, or schedule Interleaved1F1B.",
        )
    elif kind.placement is Placement.V and per_rank != 2:
        yield _refuse(
            "stages",
            f"stages_per_rank={per_rank} does not fit {kind.name}, which runs two stages a rank.",
            "Use stages_per_rank=2.",
        )
    elif per_rank < 1:
        yield _refuse("stages", f"stages_per_rank={per_rank} must be at least 1.", "Use 1 or more.")
    elif plan.num_layers is not None:
        yield from _layers(plan, plan.num_layers)


def _layers(plan: Plan, num_layers: int) -> Iterator[Rule]:
    stages, listed = plan.num_stages, plan.layers_per_stage
    if num_layers < stages:
        yield _refuse(
            "layers",
            f"num_layers={num_layers} is fewer than the {stages} stages of {plan.kind.name} over "
            f"axis 'pp' ({plan.pp} ranks, {plan.num_stages_per_rank} stages each): every stage "
            "needs a layer.",
            f"Use at least {stages} layers, or fewer stages.",
        )
    if listed is None:
        return
    if len(listed) != stages:
        yield _refuse(
            "layers",
            f"layers_per_stage={list(listed)} has {len(listed)} entries for {stages} stages (axis "
            f"'pp' has {plan.pp} ranks, {plan.num_stages_per_rank} stages each).",
            f"List {stages} numbers.",
        )
    elif sum(listed) != num_layers or min(listed) < 1:
        yield _refuse(
            "layers",
            f"layers_per_stage={list(listed)} sums to {sum(listed)}, and the model has "
            f"{num_layers} layers; every entry must be at least 1.",
            f"List numbers of at least 1 that sum to {num_layers}.",
        )


def _units(plan: Plan) -> Iterator[Rule]:
    if isinstance(plan.wrap, str) and plan.wrap not in WRAP_NAMES:
        yield _refuse(
            "units",
            f"fsdp wrap={plan.wrap!r} is not a grouping.",
            f"Use one of {', '.join(WRAP_NAMES)}, or a list of lists of module names.",
        )


def _zero_bubble(plan: Plan) -> Iterator[Rule]:
    kind = plan.kind
    if not kind.zero_bubble:
        return
    reason = (
        f"{kind.name} splits the backward pass, and units that are freed between forward and "
        "backward then get wrong gradients or none: the hooks that would gather them again never "
        "fire."
    )
    if plan.reshard_after_forward:
        yield _refuse(
            "zero-bubble reshard",
            f"reshard_after_forward=true: {reason}",
            "Use reshard_after_forward=false, or schedule Interleaved1F1B.",
        )
    elif plan.reshard_after_forward is None and (plan.wrap != "root" or plan.has_expert_units):
        # torch never frees the root by default, so the root alone needs no repair.
        yield Rule(
            decision=Decision.REPAIR,
            name="zero-bubble reshard",
            reason=reason,
            fix="Parameters stay gathered for the whole step (reshard_after_forward=false), "
            "which costs one unsharded copy of the rank's stages.",
        )
    if plan.loss_recomputations:
        yield Rule(
            decision=Decision.RUN,
            name="zero-bubble loss chunks",
            reason=f"{kind.name} splits the backward pass, and each half computes the "
            f"{plan.loss_chunks} chunks of the loss again.",
            fix="The result is exact; Interleaved1F1B computes them again once.",
        )
    if plan.num_microbatches > 1 and _BITS.get(plan.compute_dtype, 64) < _BITS.get(
        plan.reduce_dtype, 64
    ):
        yield _refuse(
            "zero-bubble precision",
            f"{kind.name} adds the gradients of {plan.num_microbatches} micro-batches in "
            f"compute={plan.compute_dtype}, below reduce={plan.reduce_dtype}.",
            "Use num_microbatches=1, compute equal to reduce, or schedule Interleaved1F1B.",
        )
    if plan.compiles:
        yield _refuse(
            "zero-bubble compile",
            f"{kind.name} splits the backward pass, which runs the graphs of a compiled layer "
            "twice, and a graph that gives its buffers away after the first time then fails.",
            "Use compile.backend=none, or schedule Interleaved1F1B.",
        )
    if plan.recomputes:
        yield _refuse(
            "zero-bubble recompute",
            f"{kind.name} splits the backward pass, and recomputes each layer 4.5 to 8 times a "
            "step instead of once.",
            "Use recompute.parts=none, or schedule Interleaved1F1B.",
        )
