"""What every rank of ``bench/train.py`` runs: training loops, optimizer steps and saves, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import paralign as pa
from bench._hand_step import HandStep
from bench._rounds import Times, turns
from bench._traffic import Traffic, TrafficCounter
from paralign.config.run import RunConfig
from paralign.local_weights import local_of
from paralign.models.llama.model import Llama
from paralign.train.build import build_data, build_pieces, init_rule, initialise_whole
from paralign.train.checkpoint import Checkpoints
from paralign.train.loop import TrainingRun

Call = Callable[[], Any]
SAME = 16 * torch.finfo(torch.float32).eps  # relative Frobenius, after some steps


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank saw of both loops.

    Attributes:
        losses: Side -> loss of every counted step.
        traffic: Side -> what the rank sent in one step.
        seconds: For each round, side -> time of one step of the whole world.
        cpu: For each round, side -> processor time of this rank.
    """

    losses: dict[str, list[float]]
    traffic: dict[str, Traffic]
    seconds: list[Times]
    cpu: list[Times]


def train_both(config: RunConfig, rounds: int) -> Trained:
    """Train in turn with ``paralign train``'s loop and with one written by hand.

    Both take the same batches from the same data, clip, move by AdamW and clear gradients.
    """
    torch.set_num_threads(1)
    ours = TrainingRun(config, lambda text: None)
    hand, data = build_hand(config), build_data(config.for_training())
    steps = {"hand": 0}

    def by_hand() -> float:
        batch = data.global_batch(steps["hand"])
        steps["hand"] += 1
        return hand(batch)[0]

    sides: dict[str, Call] = {"hand": by_hand, "paralign": lambda: ours.step().loss}
    losses: dict[str, list[float]] = {side: [] for side in sides}
    traffic: dict[str, Traffic] = {}
    for _ in range(2):  # the first step builds schedules and the optimizer's state
        for side, step in sides.items():
            with TrafficCounter() as counter:
                losses[side].append(step())
            traffic[side] = counter.traffic()
    seconds, cpu = timed(sides, rounds)
    return Trained(losses=losses, traffic=traffic, seconds=seconds, cpu=cpu)


def train_alone(config: RunConfig, rounds: int) -> Trained:
    """Train on one process with ``paralign train``'s loop."""
    ours = TrainingRun(config, lambda text: None)
    losses = [ours.step().loss for _ in range(2)]
    seconds, cpu = timed({"alone": ours.step}, rounds)
    return Trained(losses={"alone": losses}, traffic={}, seconds=seconds, cpu=cpu)


def build_hand(config: RunConfig) -> HandStep:
    """Return the loop's step composed by hand, from the same initial weights."""
    config = config.for_training()
    model, blueprint = build_pieces(config, torch.float32)
    assert isinstance(model, Llama)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    mesh = config.mesh
    return HandStep(
        model,
        degrees=(mesh.pp, mesh.dp_shard, mesh.cp),
        schedule=config.pipeline.schedule,
        num_microbatches=config.pipeline.num_microbatches,
        clip=config.optimizer.clip or float("inf"),
        lr=config.optimizer.lr,
    )


def optimizer_steps(num_parameters: int, shape: tuple[int, int], rounds: int) -> list[Times]:
    """Time AdamW over small sharded parameters: as DTensors, and on their local shards."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for _ in range(num_parameters)]
    held: dict[str, list[nn.Parameter]] = {"dtensor": [], "shards": []}
    for parameters in held.values():
        for value in whole:
            parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
            parameter.grad = distribute_tensor(value.cos(), mesh, [Shard(0)])
            parameters.append(parameter)
    plain = torch.optim.AdamW(held["dtensor"])
    quick = torch.optim.AdamW(held["shards"], fused=True)

    def on_shards() -> None:
        with pa.on_local_shards():
            quick.step()

    sides: dict[str, Call] = {"dtensor": plain.step, "shards": on_shards}
    for step in sides.values():
        step()
    found, _ = timed(sides, rounds)
    for one, other in zip(held["dtensor"], held["shards"], strict=True):
        due, made = local_of(one).detach(), local_of(other).detach()
        if not (made - due).norm() <= SAME * due.norm():
            raise RuntimeError("the two optimizers do not do the same")
    return found


def saves(folder: Path, num_bytes: int, rounds: int) -> list[Times]:
    """Time how long a save keeps this rank from training: synchronous, and in the background."""
    torch.set_num_threads(1)
    tensors: Mapping[str, Tensor] = {
        f"rank{dist.get_rank()}.{number}": torch.randn(num_bytes // 4 // 8) for number in range(8)
    }
    found = []
    made = {
        side: Checkpoints(folder / side, keep=1, is_async=side == "background")
        for side in ("waiting", "background")
    }
    for number in range(rounds + 1):
        times: Times = {}
        for side in turns(list(made), number):
            with _clock(times, side):
                made[side].save(number + 1, tensors, {})
            made[side].wait()
        if number > 0:
            found.append(times)
    return found


def timed(sides: Mapping[str, Call], rounds: int) -> tuple[list[Times], list[Times]]:
    """Return wall and processor time of every side in every round, the first left out."""
    seconds, cpu = [], []
    for number in range(rounds + 1 if rounds else 0):
        wall: Times = {}
        used: Times = {}
        for side in turns(list(sides), number):
            began = time.process_time()
            with _clock(wall, side):
                sides[side]()
            used[side] = time.process_time() - began
        if number > 0:
            seconds.append(wall)
            cpu.append(used)
    return seconds, cpu


@contextmanager
def _clock(times: Times, side: str) -> Iterator[None]:
    """Write down the time of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    yield
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    times[side] = float(slowest)
