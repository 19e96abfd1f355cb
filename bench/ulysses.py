"""Efficiency of Ulysses attention over two ranks, against one process that does the same work.

    python bench/ulysses.py [--rounds 9] [--mode ulysses|gather|balanced] [--check]

Causal attention forward and backward on [1, 8, 2048, 64] in fp32, one thread for each process. Both
sides are measured in one run, in turn: in every round rank 0 first does all of it alone while rank
1 waits, then both do it together, each fed half of the sequence. The efficiency of a round is
T1 / (2 * T2); 100 % means that communication and copies cost nothing. Each side runs as training
does, call after call: one call that is not timed, then the mean of five. (The first call after the
other side's turn is up to 1.3 times as slow on two ranks, and hardly on one: rank 1 has slept.) CPU
seconds are shown as well: on a machine that is busy with other work only they mean something.
``--check`` exits with 1 if the median is below the target.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from paralign.models.attention import CausalAttention
from paralign.parallel.context import ContextParallel, split_sequence_indices
from paralign.testing import run_on_ranks

SHAPE = (1, 8, 2048, 64)
DEGREE = 2
CALLS = 5
TARGET = 0.90
FORMAT = "  {:9.4f} s   {:7.4f} s   {:10.1%}   {:11.1%}"
MODES: dict[str, tuple[int | None, bool]] = {  # ulysses_degree, load_balance
    "ulysses": (None, False),
    "gather": (1, False),
    "balanced": (1, True),
}


def measure(mode: str, rounds: int) -> list[tuple[list[float], list[float]]]:
    """Return wall and CPU seconds of one process and of two, for each round; runs on every rank."""
    torch.set_num_threads(1)
    ulysses_degree, load_balance = MODES[mode]
    mesh = init_device_mesh("cpu", (DEGREE,), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(SHAPE, generator=generator) for _ in range(4)]  # q, k, v, output gradient
    positions = split_sequence_indices(SHAPE[2], DEGREE, dist.get_rank(), load_balance=load_balance)
    local = [x[:, :, positions].contiguous() for x in whole]
    alone = CausalAttention()
    style = ContextParallel(
        layout="BNSD", ulysses_degree=ulysses_degree, load_balance=load_balance, seq_len=SHAPE[2]
    )
    together = style.apply(CausalAttention(), mesh)
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        one = _seconds(alone, whole) if dist.get_rank() == 0 else []
        dist.barrier()
        two = torch.tensor(_seconds(together, local))
        dist.all_reduce(two, op=dist.ReduceOp.MAX)  # the pair is as fast as its slower rank
        times.append((one, two.tolist()))
    return times[1:]  # the first round warms up


def _seconds(core: Callable[..., Tensor], tensors: list[Tensor]) -> list[float]:
    """Return wall and CPU seconds of one call, the mean of several in a row."""

    def call() -> None:
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        core(q, k, v).backward(tensors[3])

    call()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        call()
    return [(time.perf_counter() - wall) / CALLS, (time.process_time() - cpu) / CALLS]


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mode", choices=sorted(MODES), default="ulysses")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below {TARGET:.0%}")
    options = parser.parse_args()
    times = run_on_ranks(measure, DEGREE, options.mode, options.rounds, timeout=300)[0]
    print(f"{options.mode} cp={DEGREE} {list(SHAPE)} causal fp32, forward + backward")
    print("round   one process   two ranks   efficiency   of CPU time")
    rows = [
        (one[0], two[0], *(a / (2 * b) for a, b in zip(one, two, strict=True)))
        for one, two in times
    ]
    for index, row in enumerate(rows):
        print(f"{index:<6d}" + FORMAT.format(*row))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("median" + FORMAT.format(*medians) + f"   (target {TARGET:.0%})")
    efficiency = medians[2]
    return 1 if options.check and not efficiency >= TARGET else 0


if __name__ == "__main__":
    raise SystemExit(main())
