"""The cases of the matrix: every mix of axes, schedule, units, attention and model on eight ranks.

``legal_cases`` is the full product of meshes, schedules, units and attention modes, ``cover`` a
part of it in which every pair of choices occurs, and every mesh with all of pp, FSDP and cp meets
every schedule and every grouping.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from paralign.config.run import RunConfig
from paralign.mesh import divisors
from paralign.parallel.context_rules import requirements
from paralign.parallel.stages import SCHEDULES, Placement
from paralign.parallel.support import Plan
from paralign.parallel.support import problems as plan_problems
from tests.parity import BASE, INIT_STD, PANGU

WORLD_SIZE = 8
NUM_HEADS = 8  # so that cp=8 divides them; llama has two of keys, fewer than most cp degrees
SEQ_LEN = 16
VARIANTS = 4  # choices of what alternates over the product, for each of its members
EXPERTS = {"num_experts": 8, "expert_hidden_size": 24, "balance_loss": 0.02}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**BASE["model"], "num_heads": NUM_HEADS, "num_kv_heads": 2},
    "mixtral": {
        "name": "llama",
        "preset": "mixtral_tiny",
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_heads": NUM_HEADS,
        "num_kv_heads": 2,
        "bias": True,
        "init_std": INIT_STD,
        **EXPERTS,
    },
    "pangu": {**PANGU, "num_heads": NUM_HEADS},
    "pangu_moe": {
        **PANGU,
        "preset": "tiny",
        "num_heads": NUM_HEADS,
        "shared_hidden_size": 20,
        "bias_update_speed": 0.01,
        **EXPERTS,
    },
}
RECOMPUTE: dict[str, Any] = {"none": "none", "block": "block", "parts": ["*_norm", "ffn"]}
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
    tp: int
    ep: int
    schedule: str
    wrap: str
    mode: str
    extra_layers: int  # beyond one a stage
    num_microbatches: int
    model: str
    tied: bool
    sequence_parallel: bool
    overlap: bool
    recompute: str

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of pp, dp_replicate, dp_shard, cp and tp."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def degrees(self) -> tuple[int, ...]:
        """The same and the degree of ep: what a world is started for."""
        return (*self.mesh, self.ep)

    @property
    def id(self) -> str:
        """A name for messages and tables."""
        mesh = "x".join(map(str, self.mesh)) + (f"-ep{self.ep}" if self.ep > 1 else "")
        rest = (self.schedule, f"M{self.num_microbatches}", self.wrap, self.mode)
        shape = f"{self.model}{'-tied' if self.tied else ''}+{self.extra_layers}"
        shape += "" if self.sequence_parallel else "-nosp"
        shape += "-overlap" if self.overlap else ""
        shape += "" if self.recompute == "none" else f"-recompute_{self.recompute}"
        return "-".join((mesh, *rest, shape))

    @property
    def num_layers(self) -> int:
        """Layers of the model: one a stage, and the extra ones, which do not divide evenly."""
        single = SCHEDULES[self.schedule.lower()].placement is Placement.SINGLE
        stages = self.pp * (1 if single else 2)
        # The first layer of pangu_moe is dense.
        return max(stages, 2 if self.model == "pangu_moe" else 1) + self.extra_layers

    def config(self) -> RunConfig:
        """Return the case as a config; it may break rules."""
        ulysses_degree, load_balance = MODES[self.mode]
        model = {
            **MODELS[self.model],
            "num_layers": self.num_layers,
            "tie_embeddings": self.tied,
        }
        sections = {
            "model": model,
            "mesh": {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "dp_shard": self.dp_shard,
                "cp": self.cp,
                "tp": self.tp,
                "ep": self.ep,
            },
            "tensor": {
                "sequence_parallel": self.sequence_parallel,
                "overlap": "chunks" if self.overlap else "none",
            },
            "recompute": {"parts": RECOMPUTE[self.recompute]},
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
            recomputes=self.recompute != "none",
        )
        ulysses_degree, load_balance = MODES[self.mode]
        num_kv_heads = MODELS[self.model].get("num_kv_heads", NUM_HEADS)
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


def meshes(world_size: int = WORLD_SIZE) -> list[tuple[int, ...]]:
    """Return every factorisation of the ranks into pp, dp_replicate, dp_shard, cp and tp."""
    found = itertools.product(divisors(world_size), repeat=5)
    return [mesh for mesh in found if math.prod(mesh) == world_size]


def legal_cases(*, variants: int = VARIANTS, world_size: int = WORLD_SIZE) -> Iterator[Case]:
    """Yield every mesh, schedule, grouping and attention mode that has a legal case.

    Everything else (micro-batches, layers that do not divide, the model, ep, tied embeddings,
    sequence parallel, overlap, recomputation) alternates over the product instead of multiplying
    it; each member of the product has several choices.

    Args:
        variants: Choices for each member of the product.
        world_size: Ranks of every case.
    """
    every = itertools.product(meshes(world_size), SCHEDULES.values(), WRAPS, MODES)
    for mesh, kind, wrap, mode in every:
        cp = mesh[3]
        if (cp == 1 and mode != "ulysses") or (mode == "hybrid" and cp < 4):
            continue  # another mode under a second name
        for variant in range(variants):
            key = mesh, kind.name, wrap, mode, variant
            if case := _case(mesh, kind.name, wrap, mode, Digits(key)):
                yield case


def _case(
    mesh: tuple[int, ...], schedule: str, wrap: str, mode: str, digits: Digits
) -> Case | None:
    pp, dp_replicate, dp_shard, cp, tp = mesh
    model = digits.choose(list(MODELS))
    has_experts = "num_experts" in MODELS[model]
    recompute = digits.choose(list(RECOMPUTE))
    sequence_parallel = tp == 1 or digits.choose([True, False])
    overlap = tp > 1 and sequence_parallel and digits.choose([True, False])
    ep = digits.choose(divisors(dp_shard * cp * tp)) if has_experts else 1
    extra_layers, tied = digits.choose([0, 1]), digits.choose([True, False, False])
    # 8 only where both others are too few.
    for num_microbatches in digits.choose([(1, 4, 8), (4, 1, 8)]):
        case = Case(
            pp=pp,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            cp=cp,
            tp=tp,
            ep=ep,
            schedule=schedule,
            wrap=wrap,
            mode=mode,
            extra_layers=extra_layers,
            num_microbatches=num_microbatches,
            model=model,
            tied=tied,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            # The support table refuses it where the backward pass is split.
            recompute="none" if SCHEDULES[schedule.lower()].zero_bubble else recompute,
        )
        if not case.problems():
            return case
    return None


class Digits:
    """Numbers that depend only on a key, in every process; chosen from as from dice."""

    def __init__(self, key: object) -> None:
        self._key = repr(key)
        self._count = 0

    def choose(self, choices: Sequence[Any]) -> Any:
        """Return one of ``choices``."""
        self._count += 1
        digest = hashlib.blake2b(f"{self._key} {self._count}".encode(), digest_size=4).digest()
        return choices[int.from_bytes(digest, "big") % len(choices)]


def cover(
    cases: Sequence[Case], *, most_ranks: int | None = None, taken: Sequence[Case] = ()
) -> list[Case]:
    """Choose cases greedily until every pair of choices that occurs at all has been taken.

    The triples of FSDP, pp and cp with every schedule and with every grouping count as pairs do.

    Args:
        cases: To choose from.
        most_ranks: Degrees from this one on are one choice: with 2, an axis is used or it is not.
        taken: Cases whose pairs need not be taken again.
    """
    made = [combinations(case, most_ranks) for case in cases]
    missing = set[tuple[object, ...]]().union(*made)
    missing -= set().union(*(combinations(case, most_ranks) for case in taken))
    # Most new pairs first. A number in the heap is never too small: pairs only go missing less.
    heap = [(-len(pairs), number) for number, pairs in enumerate(made)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        _, number = heapq.heappop(heap)
        gain = len(made[number] & missing)
        if heap and -gain > heap[0][0]:
            heapq.heappush(heap, (-gain, number))
            continue
        chosen.append(cases[number])
        missing -= made[number]
    return chosen


def combinations(case: Case, most_ranks: int | None = None) -> set[tuple[object, ...]]:
    """Return the pairs of choices of a case, and its triple of mesh, schedule and grouping."""
    num_axes = len(case.degrees)  # the first of the fields
    choices = [
        (number, min(value, most_ranks) if most_ranks and number < num_axes else value)
        for number, value in enumerate(astuple(case))
    ]
    pairs: set[tuple[object, ...]] = set(itertools.combinations(choices, 2))
    if most_ranks is None and min(case.pp, case.dp_shard, case.cp) > 1:
        pairs |= {("triple", case.schedule, case.wrap)}
    return pairs
