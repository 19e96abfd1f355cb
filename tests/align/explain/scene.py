"""A run made from random contributions of ranks and micro-batches, right or with one fault.

Every rank has a gradient of its own for every micro-batch; the reference is their sum, with the
loss and an AdamW step that follow from it. A test breaks how the parallel run puts them together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralign.align import compare
from paralign.align.trace import Facts, Kind, RankIndex, ScalarEntry, TensorEntry, TokenMap
from paralign.align.trace_writer import TraceWriter, prepare_folder
from paralign.align.verdict import Finding, Report
from paralign.layout import whole

SHAPES = {"embed.weight": (12, 4), "layers.0.w": (6, 8), "layers.1.w": (6, 8), "norm.weight": (9,)}
OPTIONS = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
LOSS = 2.5
TOKENS = 64

Tensors = dict[str, Tensor]


@dataclass
class Run:
    """What one rank of a run records of a step; a test changes it before it is written."""

    grads: Tensors
    micro: list[Tensors] = field(default_factory=list)
    inputs: list[Tensors] = field(default_factory=list)
    samples: list[tuple[int, ...]] = field(default_factory=list)
    """Per micro-batch what was told of its rows."""
    outputs: list[Tensors] = field(default_factory=list)
    """Per micro-batch; ``name#1`` is the second call of a module."""
    output_grads: list[Tensors] = field(default_factory=list)
    loss: float = LOSS
    tokens: int = TOKENS
    norm: float | None = None
    params: Tensors = field(default_factory=dict)
    moments: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)


class Scene:
    """Random contributions on a mesh whose ranks all hold whole parameters.

    Args:
        mesh: Axis -> degree, the first varies slowest. Along pp all stages hold all parameters, as
            tied ones do.
        micro_batches: Number of micro-batches.
        seed: Of all numbers.
    """

    def __init__(self, mesh: Mapping[str, int], micro_batches: int = 3, seed: int = 0) -> None:
        self.mesh = dict(mesh)
        self.micro_batches = micro_batches
        self.generator = torch.Generator().manual_seed(seed)
        self.coordinates = list(itertools.product(*(range(n) for n in self.mesh.values())))
        self.contributions = [
            [self._draw() for _ in range(micro_batches)] for _ in self.coordinates
        ]
        self.params = self._draw()

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    def _draw(self) -> Tensors:
        return {
            name: torch.randn(shape, generator=self.generator, dtype=torch.float64)
            for name, shape in SHAPES.items()
        }

    def group(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from ``rank`` only along ``axes``."""
        mine = self.coordinates[rank]
        fixed = [i for i, axis in enumerate(self.mesh) if axis not in axes]
        return [
            other
            for other, at in enumerate(self.coordinates)
            if all(at[i] == mine[i] for i in fixed)
        ]

    def local(self, rank: int) -> Tensors:
        """Return the sum of a rank's own micro-batches."""
        return total(self.contributions[rank])

    def sum_over(self, ranks: list[int]) -> Tensors:
        return total([self.local(rank) for rank in ranks])

    def right(self) -> Tensors:
        return self.sum_over(list(range(self.world_size)))

    def rank(self, grads: Tensors | None = None) -> Run:
        """Return what a rank records that has these gradients and does everything else right."""
        grads = self.right() if grads is None else grads
        run = Run(grads, params=dict(self.params))
        step(run)
        return run

    def compare(
        self,
        tmp_path: Path,
        change: Callable[[int, Run], Run | None] = lambda rank, run: None,
        **options: Any,
    ) -> Report:
        """Write the reference and a parallel run that ``change`` breaks, and compare them."""
        write(tmp_path / "ref", [self.rank()], {}, **options.get("reference", {}))
        runs = []
        for rank in range(self.world_size):
            run = self.rank()
            changed = change(rank, run)
            runs.append(run if changed is None else changed)
        given = {key: value for key, value in options.items() if key != "reference"}
        facts = {"num_microbatches": self.micro_batches, **given.pop("facts", {})}
        write(tmp_path / "par", runs, self.mesh, facts=facts, **given)
        return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)

    def explain(self, tmp_path: Path, change: Any, **options: Any) -> list[Finding]:
        """Return the findings of :meth:`compare`; the run must be misaligned."""
        report = self.compare(tmp_path, change, **options)
        assert report.verdict != "aligned", report.why
        return report.findings


def total(parts: list[Tensors]) -> Tensors:
    return {name: sum_of([part[name] for part in parts]) for name in parts[0]}


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def scaled(tensors: Tensors, factor: float, *names: str) -> Tensors:
    """Return the tensors with those of these names (or all) multiplied."""
    return {n: t * factor if n in names or not names else t for n, t in tensors.items()}


def step(run: Run, **changed: Any) -> None:
    """Make the norm, the moments and the parameters that follow from a run's gradients."""
    options = {**OPTIONS, **changed}
    first, second = options["betas"]
    run.norm = math.sqrt(sum(float(g.square().sum()) for g in run.grads.values()))
    count = options.get("step", 1)
    for name, grad in run.grads.items():
        mean, square = (1 - first) * grad, (1 - second) * grad.square()
        run.moments["exp_avg", name] = mean
        run.moments["exp_avg_sq", name] = square
        run.moments["step", name] = torch.tensor(float(options.get("shown_step", 1)))
        root = (square / (1 - second**count)).sqrt() + options["eps"]
        old = run.params[name]
        run.after[name] = old - options["lr"] * (
            mean / (1 - first**count) / root + options["weight_decay"] * old
        )


def write(
    directory: Path,
    runs: list[Run],
    mesh: Mapping[str, int],
    *,
    facts: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    pp_stage: Callable[[str], int] | None = None,
    token_dims: tuple[int, int] | None = (0, 1),
) -> None:
    """Write a trace of one step; ``runs`` are its ranks.

    ``token_dims`` are those of all outputs; None leaves them to be found by their sizes.
    """
    prepare_folder(directory, rank=0, clear_all=True)
    sizes = list(mesh.values())
    coordinates = list(itertools.product(*(range(n) for n in sizes)))
    rank_of = {at: rank for rank, at in enumerate(coordinates)}
    for rank, (at, run) in enumerate(zip(coordinates, runs, strict=True)):
        index = RankIndex(rank, len(runs), "id", steps=[0])
        index.coordinates = dict(zip(mesh, at, strict=True))
        index.axes = {
            axis: [rank_of[(*at[:dim], i, *at[dim + 1 :])] for i in range(size)]
            for dim, (axis, size) in enumerate(mesh.items())
        }
        group = {"options": {**OPTIONS, **(optimizer or {})}, "names": list(SHAPES)}
        index.optimizers = [{"class": "AdamW", "groups": [group]}]
        index.token_maps = [TokenMap(0, number, rows) for number, rows in enumerate(run.samples)]
        writer = TraceWriter(directory, index)
        replicated = tuple(axis for axis, size in mesh.items() if size > 1)

        def kept(name: str, at: tuple[int, ...] = at) -> bool:
            return pp_stage is None or at[list(mesh).index("pp")] == pp_stage(name)

        def entry(
            kind: str,
            name: str,
            value: Tensor,
            axes: tuple[str, ...] = replicated,
            **more: Any,
        ) -> tuple[TensorEntry, Tensor]:
            held = tuple(axis for axis in axes if pp_stage is None or axis != "pp")
            dtype = str(value.dtype).removeprefix("torch.")
            shape = tuple(value.shape)
            made = TensorEntry(
                kind, name, 0, dtype, shape, whole(shape), replicated_over=held, **more
            )
            return made, value

        kinds = {Kind.PARAM: run.params, Kind.GRAD: run.grads, Kind.PARAM_AFTER: run.after}
        for kind, tensors in kinds.items():
            writer.write(
                f"step0.{kind}", [entry(kind, n, t) for n, t in tensors.items() if kept(n)]
            )
        writer.write(
            "step0.moment",
            [
                entry(Kind.MOMENT, name, value, state=state)
                for (state, name), value in run.moments.items()
                if kept(name)
            ],
        )
        for number, micro in enumerate(run.micro):
            writer.write(
                f"step0.micro{number}",
                [
                    entry(Kind.MICRO_GRAD, n, t, (), micro_batch=number)
                    for n, t in micro.items()
                    if kept(n)
                ],
            )
        seen = {
            Kind.INPUT: run.inputs,
            Kind.OUTPUT: run.outputs,
            Kind.OUTPUT_GRAD: run.output_grads,
        }
        for kind, batches in seen.items():
            for number, tensors in enumerate(batches):
                items = []
                for order, (n, t) in enumerate(tensors.items()):
                    module, _, call = n.partition("#")
                    dims = (0, 1) if kind == Kind.INPUT else token_dims
                    more = {"micro_batch": number, "token_dims": dims, "call": int(call or 0)}
                    items.append(entry(kind, module, t, (), order=order, **more))
                writer.write(f"step0.{kind}{number}", items)
        writer.scalar(ScalarEntry("loss", 0, run.loss, run.tokens))
        if run.norm is not None:
            writer.scalar(ScalarEntry("norm", 0, run.norm))
        what = ["loss", "norm", "params", "grads", "optimizer"]
        what += ["inputs"] * bool(run.inputs) + ["outputs"] * bool(run.outputs)
        what += ["output_grads"] * bool(run.output_grads)
        known = {"compute_dtype": "float64", **(facts or {})}
        writer.finish(Facts("id", len(runs), [0], what, {}, known) if rank == 0 else None)
