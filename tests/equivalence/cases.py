"""The cases of the matrix: eight ranks, every mix of axes, schedule, units and attention.

``legal_cases`` is the full product, ``cover`` a part of it in which every pair of choices occurs,
and every mesh with all of pp, FSDP and cp meets every schedule and every grouping.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from paralign.config.run import RunConfig
from paralign.parallel.context_rules import requirements
from paralign.parallel.stages import SCHEDULES, Placement
from paralign.parallel.support import Plan
from paralign.parallel.support import problems as plan_problems
from tests.parity import BASE, PANGU

WORLD_SIZE = 8
NUM_HEADS = 8  # so that cp=8 divides them; llama has two of keys, fewer than most cp degrees
SEQ_LEN = 16
WRAPS: dict[str, Any] = {
    "root": "root",
    "blocks": "blocks",
    "first": "first_block",
    "lists": [["embedding"], ["layers.0", "layers.1"], ["layers.2.attention"], ["norm", "head"]],
}
# ulysses_degree and load_balance; None is the whole axis.
MODES: dict[str, tuple[int | None, bool]] = {
    "ulysses": (None, False),
    "gather": (1, False),
    "balanced": (1, True),
    "hybrid": (2, False),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    schedule: str
    wrap: str
    mode: str
    extra_layers: int  # beyond one a stage
    num_microbatches: int
    model: str
    tied: bool
    tp: int = 1
    sequence_parallel: bool = True

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of pp, dp_replicate, dp_shard and cp, and of tp where there is more than one."""
        others = self.pp, self.dp_replicate, self.dp_shard, self.cp
        return others if self.tp == 1 else (*others, self.tp)

    @property
    def id(self) -> str:
        """A name for messages and tables."""
        mesh = "x".join(map(str, self.mesh))
        rest = (self.schedule, f"M{self.num_microbatches}", self.wrap, self.mode)
        shape = f"{self.model}{'-tied' if self.tied else ''}+{self.extra_layers}"
        shape += "" if self.sequence_parallel else "-nosp"
        return "-".join((mesh, *rest, shape))

    @property
    def num_layers(self) -> int:
        """Layers of the model: one a stage, and the extra ones, which do not divide evenly."""
        single = SCHEDULES[self.schedule.lower()].placement is Placement.SINGLE
        return self.pp * (1 if single else 2) + self.extra_layers

    def config(self) -> RunConfig:
        """Return the case as a config; it may break rules."""
        ulysses_degree, load_balance = MODES[self.mode]
        model = (
            {**BASE["model"], "num_heads": NUM_HEADS, "num_kv_heads": 2}
            if self.model == "llama"
            else {**PANGU, "num_heads": NUM_HEADS}
        )
        sections = {
            "model": {**model, "num_layers": self.num_layers, "tie_embeddings": self.tied},
            "mesh": {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "dp_shard": self.dp_shard,
                "cp": self.cp,
                "tp": self.tp,
            },
            "tensor": {"sequence_parallel": self.sequence_parallel},
            "pipeline": {"schedule": self.schedule, "num_microbatches": self.num_microbatches},
            "fsdp": {"wrap": self._wrap()},
            "context": {"ulysses_degree": ulysses_degree, "load_balance": load_balance},
            "batch": {"global_batch": 8 * self.num_microbatches, "seq_len": SEQ_LEN},
        }
        return RunConfig.model_validate({**BASE, **sections})

    def problems(self) -> list[str]:
        """Return why the case is refused. The other rules of a config hold for every case."""
        plan = Plan(
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            pp=self.pp,
            num_layers=self.num_layers,
            wrap=WRAPS[self.wrap],
        )
        ulysses_degree, load_balance = MODES[self.mode]
        num_kv_heads = 2 if self.model == "llama" else NUM_HEADS
        return plan_problems(plan) + requirements(
            num_heads=NUM_HEADS // self.tp,
            num_kv_heads=max(1, num_kv_heads // self.tp),
            seq_len=SEQ_LEN,
            degree=self.cp,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
        )

    def _wrap(self) -> Any:
        wrap = WRAPS[self.wrap]
        if isinstance(wrap, str):
            return wrap
        missing = [f"layers.{i}" for i in range(self.num_layers, 3)]
        units = [[n for n in unit if n.removesuffix(".attention") not in missing] for unit in wrap]
        if self.tied:  # both ends of a tied pair belong to one unit: the root
            units = [unit for unit in units if not {"embedding", "head"} & set(unit)]
        return [unit for unit in units if unit]


def meshes(tp: int = 1) -> list[tuple[int, int, int, int]]:
    """Return every factorisation of eight ranks, or of what ``tp`` leaves of them."""
    sizes = (1, 2, 4, 8)
    return [
        (pp, dp_replicate, dp_shard, cp)
        for pp, dp_replicate, dp_shard, cp in itertools.product(sizes, repeat=4)
        if pp * dp_replicate * dp_shard * cp * tp == WORLD_SIZE
    ]


def tensor_cases() -> Iterator[Case]:
    """Yield the same for every mesh with tp, with and without sequence parallel in turn."""
    for tp in (2, 4, 8):
        yield from legal_cases(tp)


def legal_cases(tp: int = 1) -> Iterator[Case]:
    """Yield every mesh, schedule, grouping and attention mode that has a legal case.

    The number of micro-batches, layers that do not divide, the model and tied embeddings alternate
    over the product instead of multiplying it.
    """
    for mesh, kind, wrap, mode in itertools.product(meshes(tp), SCHEDULES.values(), WRAPS, MODES):
        cp = mesh[3]
        if (cp == 1 and mode != "ulysses") or (mode == "hybrid" and cp < 4):
            continue  # another mode under a second name
        number = hash_of((mesh, kind.name, wrap, mode))
        order = (1, 4, 8) if number % 2 else (4, 1, 8)  # 8 only where both others are too few
        for num_microbatches in order:
            case = Case(
                pp=mesh[0],
                dp_replicate=mesh[1],
                dp_shard=mesh[2],
                cp=cp,
                schedule=kind.name,
                wrap=wrap,
                mode=mode,
                extra_layers=number // 2 % 2,
                num_microbatches=num_microbatches,
                model=("llama", "pangu_moe")[number // 4 % 2],
                tied=number // 8 % 3 == 0,
                tp=tp,
                sequence_parallel=tp == 1 or number // 3 % 2 == 0,
            )
            if not case.problems():
                yield case
                break


def hash_of(key: object) -> int:
    """Return a number that depends only on ``key``, in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(repr(key)))


def cover(cases: Sequence[Case]) -> list[Case]:
    """Choose cases greedily until every pair of choices that occurs at all has been taken.

    The triples of FSDP, pp and cp with every schedule and with every grouping count as pairs do.
    """
    wanted = {case: _combinations(case) for case in cases}
    missing = set().union(*wanted.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(wanted[case] & missing))
        chosen.append(best)
        missing -= wanted[best]
    return chosen


def _combinations(case: Case) -> set[tuple[object, ...]]:
    choices = tuple(enumerate(astuple(case)))
    pairs: set[tuple[object, ...]] = set(itertools.combinations(choices, 2))
    if min(case.pp, case.dp_shard, case.cp) > 1:
        pairs |= {("triple", case.mesh, case.schedule, case.wrap)}
    return pairs
