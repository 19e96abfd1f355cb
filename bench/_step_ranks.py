"""What every rank of ``bench/step.py`` runs: both steps on the same batches, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import paralign as pa
from bench._hand_step import IGNORED, HandStep
from bench._rounds import Times, turns
from bench._traffic import Traffic, TrafficCounter
from paralign.launch import report_event
from paralign.models.llama.blueprint import LlamaBlueprint
from paralign.models.llama.model import Llama
from paralign.models.llama.presets import LlamaConfig
from paralign.train.build import initialise_whole

SEED = 0
CLIP = 1.0
LR = 3e-4

Step = Callable[[Mapping[str, Tensor]], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan that both sides run."""

    config: LlamaConfig
    degrees: tuple[int, int, int]  # pp, dp_shard, cp
    schedule: str
    num_microbatches: int
    global_batch: int
    seq_len: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        pp, dp, cp = self.degrees
        return pp * dp * cp

    def describe(self) -> str:
        """Return sizes of model, mesh and batch on one line."""
        config, (pp, dp, cp) = self.config, self.degrees
        return (
            f"pp={pp} dp_shard={dp} cp={cp}, {config.num_layers} layers of {config.hidden_size}, "
            f"batch [{self.global_batch}, {self.seq_len}]"
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank saw.

    Attributes:
        values: Side -> loss and gradient norm of every counted step.
        traffic: Side -> what the rank sent in one step.
        seconds: For each round, side -> time of one step of the whole world.
        cpu: For each round, side -> processor time of this rank, which hardly depends on what else
            the machine does.
    """

    values: dict[str, list[tuple[float, float]]]
    traffic: dict[str, Traffic]
    seconds: list[Times] = field(default_factory=list)
    cpu: list[Times] = field(default_factory=list)


def measure(case: Case, rounds: int) -> Measured:
    """Build both sides, train two steps and count what the second sends, then time ``rounds``.

    Args:
        case: The plan.
        rounds: Timed rounds, after one that warms up; each runs both sides and the twin once, in an
            order that changes from round to round. 0: nothing is timed.
    """
    torch.set_num_threads(1)
    sides: dict[str, Step] = {"hand": build_hand(case), "paralign": build_paralign(case)}
    result = Measured(values={side: [] for side in sides}, traffic={})
    for number in range(2):  # the first step builds schedules and the optimizer's state
        batch = random_batch(case, number)
        for side, step in sides.items():
            with TrafficCounter() as counter:
                result.values[side].append(step(batch))
            result.traffic[side] = counter.traffic()
    if rounds:
        sides["twin"] = build_hand(case)
    for number in range(rounds + 1 if rounds else 0):
        batch = random_batch(case, number)
        times = {side: _time(sides[side], batch) for side in turns(list(sides), number)}
        if number > 0:
            result.seconds.append({side: seconds for side, (seconds, _) in times.items()})
            result.cpu.append({side: cpu for side, (_, cpu) in times.items()})
        report_event(f"round {number}")
    return result


def build_paralign(case: Case) -> Step:
    """Return a training step as paralign's documentation writes it."""
    pp, dp, cp = case.degrees
    mesh = pa.build_mesh(pa.Degrees(pp=pp, dp_shard=dp, cp=cp))
    with torch.device("meta"):
        model = Llama(case.config)
    program = pa.parallelize(
        model,
        mesh,
        blueprint=LlamaBlueprint(case.config),
        pipeline=pa.Pipeline(schedule=case.schedule, num_microbatches=case.num_microbatches),
        fsdp=pa.FSDP(wrap="blocks"),
        seed=SEED,
    )
    optimizer = torch.optim.AdamW(program.parameters(), lr=LR)

    def step(global_batch: Mapping[str, Tensor]) -> tuple[float, float]:
        loss = program.step(program.shard(global_batch))
        norm = program.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss), float(norm)

    return step


def build_hand(case: Case) -> Step:
    """Return the same step composed by hand, from the same initial weights."""
    model = Llama(case.config)
    initialise_whole(model, LlamaBlueprint(case.config).init, seed=SEED)
    return HandStep(
        model,
        degrees=case.degrees,
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        clip=CLIP,
        lr=LR,
    )


def random_batch(case: Case, number: int) -> dict[str, Tensor]:
    """Return global batch ``number``, its rows padded to different lengths."""
    generator = torch.Generator().manual_seed(number)
    shape = (case.global_batch, case.seq_len)
    tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
    labels = tokens.roll(-1, dims=1)
    lengths = torch.randint(case.seq_len // 2, case.seq_len, (shape[0], 1), generator=generator)
    labels[torch.arange(case.seq_len) >= lengths] = IGNORED
    return {"tokens": tokens, "labels": labels}


def _time(step: Step, batch: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the time of the slowest rank, and the processor time of this one."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    step(batch)
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest), cpu
