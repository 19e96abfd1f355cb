"""Kills a random rank of a training run at a random moment, again and again: docs/kills.md.

    python -m tests.equivalence.kills docs/kills.md --kills 50

A run saves after every step and is started again after each kill until it has made all its steps;
then the next run begins. Every start must find a complete checkpoint, the newest one there is, and
every run must end with the bits and the losses of one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paralign.commands.files import write_atomically
from paralign.config.run import RunConfig
from paralign.errors import RankError
from paralign.launch import run_ranks
from paralign.train.checkpoint import find_checkpoints
from paralign.train.loop import run_local_rank
from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config

MESH = {"pp": 2, "dp_shard": 2}
STEPS = 24
EARLY = 0.3  # share of kills while ranks start, meet and load; the others are while they train
LONGEST_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill.

    Attributes:
        rank: Who was killed.
        seconds: When, after the ranks were started, or after they had said something.
        doing: What the run had said last.
        partial: Whether a checkpoint was being written.
        complete: Step of the newest complete checkpoint that it left; 0: none.
        went_on_from: Step that the next start went on from.
    """

    rank: int
    seconds: float
    doing: str
    partial: bool
    complete: int
    went_on_from: int


class Killer:
    """Kills a random child of this process once, at a random moment.

    The moment counts from the start of the ranks, or from the first thing they say.
    """

    def __init__(self, random_numbers: random.Random) -> None:
        self.rank: int | None = None
        self.is_early = random_numbers.random() < EARLY
        self.seconds = random_numbers.uniform(0.0, LONGEST_S)
        self._choice = random_numbers.random()
        self._timer = threading.Timer(self.seconds, self._kill)
        self._is_started = False

    def heard(self) -> None:
        """Be told that the ranks have said something."""
        if not self._is_started:
            self._is_started = True
            self._timer.start()

    def __enter__(self) -> Killer:
        if self.is_early:
            self.heard()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        if self._is_started:
            self._timer.join()

    def _kill(self) -> None:
        children = sorted(multiprocessing.active_children(), key=lambda child: child.name)
        if children:
            number = int(self._choice * len(children))
            pid = children[number].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.rank = number


def config_of(folder: Path, steps: int) -> RunConfig:
    """Return the run: some steps a second, a checkpoint after each, in the background."""
    train = {"steps": steps, "save_every": 1, "log_every": 1, "keep": 2}
    return training_config(folder, mesh=MESH, train=train)


def kill_until_done(config: RunConfig, random_numbers: random.Random) -> list[Kill]:
    """Train to the end, however often it is killed."""
    kills: list[Kill] = []
    left: Kill | None = None
    folder = Path(config.train.dir) / "checkpoints"
    for _ in range(100 * config.train.steps):
        said: list[str] = []
        with Killer(random_numbers) as killer:

            def heard(
                rank: int, text: str, said: list[str] = said, killer: Killer = killer
            ) -> None:
                said.append(text)
                killer.heard()

            try:
                run_ranks(
                    run_local_rank,
                    config.mesh.degrees.world_size,
                    config,
                    timeout=120,
                    on_event=heard,
                )
            except RankError:
                if killer.rank is None:
                    raise
                is_done = False
            else:
                is_done = True
        if left is not None and (said or is_done):
            kills.append(_with(left, _started_at(said)))
            left = None
        if is_done:
            return kills
        found = find_checkpoints(folder)
        now = Kill(
            rank=killer.rank or 0,
            seconds=killer.seconds,
            doing=said[-1].split(":")[0] if said else "starting",
            partial=any(folder.glob(".*")),
            complete=found[-1].step if found else 0,
            went_on_from=-1,
        )
        if left is not None:  # killed before it could say where it goes on from
            kills.append(_with(left, now.complete))
        left = now
    raise AssertionError(f"{config.train.dir} makes no progress")


def _with(kill: Kill, step: int) -> Kill:
    return Kill(**{**vars(kill), "went_on_from": step})


def _started_at(said: Sequence[str]) -> int:
    return next((int(text[-8:]) for text in said if text.startswith("going on from")), 0)


def study(folder: Path, num_kills: int, seed: int, *, steps: int = STEPS) -> Iterator[Kill]:
    """Yield kills of one run of ``steps`` after the other, each compared with the calm one.

    Raises:
        AssertionError: A run went on from another step than the newest complete one, or ended
            otherwise than the calm run.
    """
    random_numbers = random.Random(seed)
    calm = config_of(folder / "calm", steps)
    run(calm)
    due, losses = tensors_in(newest(calm)), _losses(calm)
    made = number = 0
    while made < num_kills:
        config = config_of(folder / f"run{number}", steps)
        for kill in kill_until_done(config, random_numbers):
            assert kill.went_on_from == kill.complete, kill
            made += 1
            yield kill
        found = tensors_in(newest(config))
        assert found.keys() == due.keys()
        assert all(torch.equal(found[name], due[name]) for name in due), config.train.dir
        assert _losses(config) == losses, config.train.dir
        assert not list((Path(config.train.dir) / "checkpoints").glob(".*"))
        number += 1


def _losses(config: RunConfig) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(config.train.dir))]


def page(kills: Sequence[Kill], seed: int, seconds: float) -> str:
    """Return docs/kills.md."""
    moments = Counter(" ".join(kill.doing.split()[:1]) for kill in kills)
    lines = [
        "# Killed while training",
        "",
        "Written by `python -m tests.equivalence.kills docs/kills.md "
        f"--kills {len(kills)} --seed {seed}`; not to be edited. {seconds:.0f} s.",
        "",
        f"A random rank of {' x '.join(f'{a}={n}' for a, n in MESH.items())} got SIGKILL at a "
        f"random moment, {len(kills)} times. Every run saves after each of its {STEPS} steps, in "
        "the background, and was started again until it was done.",
        "",
        "| | |",
        "|---|---|",
        f"| starts after a kill that went on from the newest complete checkpoint | {len(kills)} of "
        f"{len(kills)} |",
        "| runs that ended with other bits or losses than the calm run | 0 |",
        f"| kills while a checkpoint was being written | {sum(k.partial for k in kills)} |",
        f"| kills before the ranks had said anything | {moments['starting']} |",
        f"| kills of each rank | {_counted(Counter(k.rank for k in kills))} |",
        "",
        "| rank | after | had said last | newest complete | went on from |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {k.rank} | {k.seconds:.2f} s | {k.doing} | {k.complete} | {k.went_on_from} |"
        for k in kills
    ]
    return "\n".join(lines) + "\n"


def _counted(counts: Counter[int]) -> str:
    return ", ".join(f"{rank}: {counts[rank]}" for rank in sorted(counts))


def main() -> None:
    """Kill, compare and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    kills = []
    with tempfile.TemporaryDirectory(prefix="paralign-kills-") as folder:
        for kill in study(Path(folder), options.kills, options.seed):
            kills.append(kill)
            sys.stderr.write(f"{len(kills)} {kill}\n")
    write_atomically(options.page, page(kills, options.seed, time.perf_counter() - began))


if __name__ == "__main__":
    main()
