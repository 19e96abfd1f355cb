"""Every static rule that joins keys of a config. Each rule looks only at keys that are sound.

A rule returns sentences that name the values, the rule and the fix; all rules are asked, so that a
user sees everything at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from paralign.config.compile_rules import compile_problems
from paralign.config.data_rules import (
    packing_problems,
    tokenizer_problems,
    validation_problems,
)
from paralign.config.fitting import fitting_meshes
from paralign.config.model_choice import ModelChoice, choose_model
from paralign.config.references import read_signature
from paralign.config.run import RunConfig
from paralign.config.section_rules import overlap_problems, part_problems, unit_problems
from paralign.config.start_rules import start_problems
from paralign.config.training_rules import (
    check_problems,
    metrics_problems,
    optimizer_problems,
    profile_problems,
    schedule_problems,
)
from paralign.data.corpus import Corpus, find_corpus
from paralign.data.source import check_length
from paralign.data.tokenizer import BYTES
from paralign.errors import ConfigError, DataError, MeshError, ScheduleError
from paralign.mesh import Degrees, divisors
from paralign.models.registry import MODELS
from paralign.parallel.context_rules import requirements
from paralign.parallel.stages import find_schedule
from paralign.parallel.support import Plan
from paralign.parallel.support import problems as plan_problems


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rule may look at."""

    config: RunConfig
    model: ModelChoice
    world_size: int | None  # None: as many ranks as the mesh asks for will be started

    @cached_property
    def corpus(self) -> Corpus | DataError:
        """The files of the data source, or what is wrong with it."""
        try:
            return find_corpus(self.config.data.source)
        except DataError as error:
            return error


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check, and the keys that must be sound for it to make sense."""

    needs: tuple[str, ...]
    check: Callable[[Facts], Iterator[str]]


def find_problems(
    config: RunConfig, *, unsound: frozenset[str] = frozenset(), world_size: int | None = None
) -> list[str]:
    """Return every rule that ``config`` breaks, one or two sentences each.

    Args:
        config: The config to look at.
        unsound: Dotted paths whose value could not be read; rules that need them are left out.
        world_size: Number of ranks that exist already, when they do.
    """
    facts = Facts(config=config, model=choose_model(config.model), world_size=world_size)
    sick = set(unsound) | ({"model"} if facts.model.problems else set())
    return [
        problem
        for rule in RULES
        if not any(_touches(need, path) for need in rule.needs for path in sick)
        for problem in rule.check(facts)
    ]


def plan_of(config: RunConfig, model: ModelChoice | None = None) -> Plan:
    """Return what the support table looks at."""
    model = model or choose_model(config.model)
    pipeline = config.pipeline
    return Plan(
        schedule=pipeline.schedule,
        num_microbatches=pipeline.num_microbatches,
        pp=config.mesh.pp,
        stages_per_rank=pipeline.stages_per_rank,
        num_layers=model.size("num_layers"),
        layers_per_stage=pipeline.layers_per_stage,
        wrap=config.fsdp.wrap,
        reshard_after_forward=config.fsdp.reshard,
        has_expert_units=config.mesh.ep > 1
        or (config.mesh.tp > 1 and bool(model.size("num_experts"))),
        compute_dtype=config.precision.compute,
        reduce_dtype=config.precision.reduce,
        loss_chunks=config.loss.chunks,
        recomputes=config.recompute.parts != "none",
        compiles=config.compile.backend != "none",
    )


def _touches(need: str, path: str) -> bool:
    """Whether an unsound ``path`` spoils ``need``: either may be a section that holds the other."""
    return need == path or need.startswith(f"{path}.") or path.startswith(f"{need}.")


def _model(facts: Facts) -> Iterator[str]:
    yield from choose_model(facts.config.model).problems


def _program(facts: Facts) -> Iterator[str]:
    reference = facts.config.program
    if reference is None:
        return
    try:
        signature = read_signature("program", reference)
    except ConfigError as error:
        yield str(error)
        return
    given = len(signature.required)
    if not signature.takes_any and not given <= 3 <= len(signature.names):
        yield (
            f"program={reference!r} takes ({', '.join(signature.names)}), but is called with "
            "(model, mesh, config). Write `def build(model, mesh, config):`."
        )


def _carved(facts: Facts) -> Iterator[str]:
    mesh = facts.config.mesh
    inner = mesh.dp_shard * mesh.cp * mesh.tp
    if inner % mesh.ep:
        legal = ", ".join(map(str, divisors(inner)))
        yield (
            f"mesh.ep={mesh.ep} is carved out of dp_shard * cp * tp = {inner} and must divide it. "
            f"Use ep in {{{legal}}}."
        )


def _world(facts: Facts) -> Iterator[str]:
    mesh = facts.config.mesh
    # ep adds no ranks; whether it divides is judged by another rule.
    if facts.world_size is not None:
        try:
            mesh.model_copy(update={"ep": 1}).degrees.check_world_size(facts.world_size)
        except MeshError as error:
            found = fitting_meshes(
                facts.config, facts.world_size, is_sound=lambda config: not find_problems(config)
            )
            fits = f"These fit: {', '.join(found)}." if found else "None was found that fits."
            yield f"{error} {fits}"


def _schedule(facts: Facts) -> Iterator[str]:
    try:
        find_schedule(facts.config.pipeline.schedule)
    except ScheduleError as error:
        yield f"pipeline.{error}"


def _plan(facts: Facts) -> Iterator[str]:
    # What paralign's own parallel code can do is no limit for the user's.
    if facts.config.program is None and not list(_schedule(facts)):
        yield from plan_problems(plan_of(facts.config, _sound_sizes(facts)))


def _rows(facts: Facts) -> Iterator[str]:
    config = facts.config
    if config.program is not None:
        return
    rows, pieces = config.batch.global_batch, config.pipeline.num_microbatches
    dp = config.mesh.dp_replicate * config.mesh.dp_shard
    share = dp * pieces
    if rows % share:
        below = rows - rows % share
        fix = f"{below} or {below + share}" if below else f"{share}"
        product = f"{config.mesh.dp_replicate} * {config.mesh.dp_shard} * {pieces} = {share}"
        yield (
            f"batch.global_batch={rows} does not divide into dp_replicate * dp_shard * "
            f"num_microbatches = {product} equal pieces (remainder {rows % share}). "
            f"Use global_batch={fix}."
        )


def _sequence(facts: Facts) -> Iterator[str]:
    config, cp = facts.config, facts.config.mesh.cp
    if config.program is not None:
        return
    # Where the heads are unknown, only the sequence is judged: any number that divides stands in.
    model = _sound_sizes(facts)
    num_heads = model.size("num_heads") or cp
    num_kv_heads = model.size("num_kv_heads") or num_heads
    left = ""
    if config.mesh.tp > 1 and num_heads % config.mesh.tp == 0 and model.size("num_heads"):
        # What tp has left of them on a rank; that it divides is another rule.
        left = f" Heads are counted after tp={config.mesh.tp} has split num_heads={num_heads}."
        num_heads //= config.mesh.tp
        num_kv_heads = max(1, num_kv_heads // config.mesh.tp)
    problems = requirements(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seq_len=config.batch.seq_len,
        degree=cp,
        ulysses_degree=config.context.ulysses_degree,
        load_balance=config.context.load_balance,
    )
    yield from (f"{problem.rstrip('.')}.{left}" for problem in problems)
    yield from _stream(config, bool(model.size("num_experts"))) if not problems else ()


def _stream(config: RunConfig, has_experts: bool) -> Iterator[str]:
    """The stream of a rank is cut over tp once more, with sequence parallel or at experts."""
    cuts_sequence = config.tensor.sequence_parallel
    parts = config.mesh.tp if cuts_sequence or has_experts else 1
    local = config.batch.seq_len // config.mesh.cp
    if local % parts:
        share = math.lcm(
            config.mesh.cp * parts, config.mesh.cp * (2 if config.context.load_balance else 1)
        )
        below = config.batch.seq_len // share * share
        fix = f"seq_len={below} or {below + share}" if below else f"seq_len={share}"
        yield (
            f"batch.seq_len={config.batch.seq_len} over cp={config.mesh.cp} leaves {local} tokens, "
            f"which do not divide over axis 'tp' ({parts} ranks, remainder {local % parts}), as "
            + (
                f"experts need. Use {fix}."
                if has_experts
                else f"tensor.sequence_parallel needs. Use {fix}, or "
                "tensor.sequence_parallel=false."
            )
        )


def _loss(facts: Facts) -> Iterator[str]:
    config, chunks = facts.config, facts.config.loss.chunks
    if chunks == 1:
        return
    if config.program is not None:
        yield (
            f"loss.chunks={chunks} is for paralign's own parallel code, and program is set. Remove "
            "loss.chunks, and cut the loss in your own code."
        )
        return
    if config.align.record == "activations":
        yield (
            f"loss.chunks={chunks} and align.record=activations: the head's output never exists, "
            "so it cannot be recorded. Use loss.chunks=1, or align.record=gradients."
        )
    parts = config.mesh.cp * (config.mesh.tp if config.tensor.sequence_parallel else 1)
    most = max(1, config.batch.seq_len // parts)
    if chunks > most:
        yield (
            f"loss.chunks={chunks} is more than the {most} tokens of a row that a rank has at the "
            f"head: batch.seq_len={config.batch.seq_len} over {parts} ranks of cp and tp. Use "
            f"loss.chunks={most} or fewer."
        )


def _compile(facts: Facts) -> Iterator[str]:
    yield from compile_problems(facts.config)


def _start(facts: Facts) -> Iterator[str]:
    yield from start_problems(facts.config, facts.model.config)


def _model_sizes(facts: Facts) -> Iterator[str]:
    config = facts.config
    if facts.model.config is not None and config.model.name is not None:
        ep = 1 if list(_carved(facts)) else config.mesh.ep
        degrees = config.mesh.model_copy(update={"ep": ep}).degrees
        if config.program is not None:
            degrees = Degrees()
        entry = MODELS[config.model.name]
        for problem in entry.problems(facts.model.config, degrees, config.batch.seq_len):
            yield f"model: {problem.rstrip('.')}."


def _sound_sizes(facts: Facts) -> ModelChoice:
    """The model, without its sizes where they are wrong by themselves: that is said elsewhere."""
    return ModelChoice() if list(_model_sizes(facts)) else facts.model


def _vocabulary(facts: Facts) -> Iterator[str]:
    yield from tokenizer_problems(facts.config.data, facts.model.size("vocab_size"))


def _packing(facts: Facts) -> Iterator[str]:
    yield from packing_problems(facts.config)


def _validation(facts: Facts) -> Iterator[str]:
    yield from validation_problems(facts.config.validation)


def _source(facts: Facts) -> Iterator[str]:
    if isinstance(facts.corpus, DataError):
        yield str(facts.corpus)


def _source_length(facts: Facts) -> Iterator[str]:
    config, corpus = facts.config, facts.corpus
    if isinstance(corpus, DataError):
        return  # said by the rule above
    if config.data.tokenizer != BYTES or config.data.packing != "none":
        return  # how many tokens there are is known when they have been made
    holds_out = config.validation.every > 0 and config.validation.source is None
    try:
        check_length(
            corpus,
            seq_len=config.batch.seq_len,
            num_rows=config.batch.global_batch,
            held_out=config.validation.share if holds_out else None,
        )
    except DataError as error:
        yield str(error)


def _optimizer(facts: Facts) -> Iterator[str]:
    yield from optimizer_problems(facts.config.optimizer)


def _training(facts: Facts) -> Iterator[str]:
    yield from schedule_problems(facts.config.schedule, facts.config.train)
    yield from check_problems(facts.config.train)


def _metrics(facts: Facts) -> Iterator[str]:
    yield from metrics_problems(facts.config.metrics)


def _profile(facts: Facts) -> Iterator[str]:
    config = facts.config
    # ep adds no ranks; whether it divides is judged by another rule.
    degrees = config.mesh.model_copy(update={"ep": 1}).degrees
    yield from profile_problems(config.profile, config.train, degrees.world_size)


def _overlap(facts: Facts) -> Iterator[str]:
    yield from overlap_problems(facts.config.tensor)


def _parts(facts: Facts) -> Iterator[str]:
    yield from part_problems(facts.config.precision)


def _units(facts: Facts) -> Iterator[str]:
    yield from unit_problems(facts.config.fsdp)


RULES = (
    Rule(needs=(), check=_model),
    Rule(needs=("program",), check=_program),
    Rule(needs=("mesh.ep", "mesh.dp_shard", "mesh.cp", "mesh.tp"), check=_carved),
    Rule(needs=("mesh", "model", "batch"), check=_world),
    Rule(needs=("pipeline.schedule",), check=_schedule),
    Rule(
        needs=(
            *("pipeline", "mesh.pp", "fsdp", "precision", "loss", "recompute", "compile"),
            "model",
        ),
        check=_plan,
    ),
    Rule(
        needs=(
            "batch.global_batch",
            "pipeline.num_microbatches",
            "mesh.dp_replicate",
            "mesh.dp_shard",
        ),
        check=_rows,
    ),
    Rule(
        needs=("batch.seq_len", "mesh.cp", "mesh.tp", "context", "tensor", "model"), check=_sequence
    ),
    Rule(
        needs=("loss", "mesh.cp", "mesh.tp", "tensor", "batch.seq_len", "align.record", "program"),
        check=_loss,
    ),
    Rule(needs=("tensor",), check=_overlap),
    Rule(needs=("model", "mesh", "batch.seq_len"), check=_model_sizes),
    Rule(needs=("model", "data.tokenizer", "data.end_token"), check=_vocabulary),
    Rule(needs=("model", "train.dir"), check=_start),
    Rule(needs=("data.source",), check=_source),
    Rule(needs=("data", "batch", "validation"), check=_source_length),
    Rule(needs=("data.packing", "batch.seq_len"), check=_packing),
    Rule(needs=("validation",), check=_validation),
    Rule(needs=("precision",), check=_parts),
    Rule(needs=("compile", "mesh.tp", "recompute", "align.record", "program"), check=_compile),
    Rule(needs=("optimizer",), check=_optimizer),
    Rule(needs=("schedule", "train"), check=_training),
    Rule(needs=("metrics",), check=_metrics),
    Rule(needs=("profile", "train.steps", "mesh"), check=_profile),
    Rule(needs=("fsdp.wrap",), check=_units),
)
