"""What the ranks were fed in a step: tokens, labels and positions, by rank and micro-batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.inspect.view import View
from paralign.align.token_map import step_samples, told_inputs

_ROLES = {
    "pp": re.compile(r"pp|pipe(line)?|stage"),
    "tp": re.compile(r"e?tp|mp|tensor(_model)?(_parallel)?|model(_parallel)?"),
    "cp": re.compile(r"cp|sp|ctx|context(_parallel)?|seq(uence)?(_parallel)?|ulysses|ring"),
    "dp": re.compile(r"(e?dp|data|e?fsdp|hsdp|ddp|zero|replicate|shard)(_\w+)?"),
    "ep": re.compile(r"ep|experts?(_parallel)?"),
}
_FEWEST_TOKENS = 8  # shorter rows may be equal by chance


def role_of(axis: str) -> str | None:
    """Return what an axis is for by its name: a key of ``_ROLES``; None if it does not tell."""
    name = axis.lower().partition("#")[0]
    return next((role for role, names in _ROLES.items() if names.fullmatch(name)), None)


@dataclass(frozen=True)
class Fed:
    """The inputs of one micro-batch on one rank."""

    rank: int
    micro_batch: int
    tokens: Tensor
    """``[rows, positions]``"""
    labels: Tensor | None
    positions: Tensor | None
    samples: tuple[int, ...] | None

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The rows, to be compared."""
        return [tuple(row) for row in self.tokens.tolist()]


class Feed:
    """All inputs of a step. Of a pipeline the first stage's tokens and the last one's labels."""

    def __init__(self, view: View, step: int) -> None:
        self.view = view
        self.step = step
        self.roles = {axis: role_of(axis) for axis in view.axes}
        told = told_inputs(view.reader, step)
        samples = step_samples(view.reader, step)
        self.by_rank: dict[int, list[Fed]] = {}
        for (rank, micro_batch), given in sorted(told.items()):
            if "tokens" not in given:
                continue
            found = {
                name: given.get(name, self._of_other_stage(told, rank, micro_batch, name))
                for name in ("labels", "positions")
            }
            shape = given["tokens"].shape
            fits = {n: t for n, t in found.items() if t is not None and t.shape == shape}
            fed = Fed(
                rank,
                micro_batch,
                given["tokens"],
                fits.get("labels"),
                fits.get("positions"),
                samples.get((rank, micro_batch)),
            )
            self.by_rank.setdefault(rank, []).append(fed)

    def axes(self, role: str) -> list[str]:
        """Return the axes that have a role."""
        return [axis for axis, its in self.roles.items() if its == role]

    def first(self, *roles: str) -> list[int]:
        """Return the fed ranks whose peers along axes of ``roles`` all come later."""
        axes = [axis for role in roles for axis in self.axes(role)]
        return [
            rank
            for rank in self.by_rank
            if not any(
                peer < rank and peer in self.by_rank
                for axis in axes
                for peer in self.view.group(rank, axis)
            )
        ]

    def groups(self, role: str) -> Iterator[list[list[Fed]]]:
        """Yield, per group of the axes of a role, every member's micro-batches in rank order."""
        axes = self.axes(role)
        done: set[int] = set()
        for rank in self.by_rank:
            if rank in done or not axes:
                continue
            members = sorted(self.view.reach(rank, axes) & self.by_rank.keys())
            done |= set(members)
            if len(members) > 1:
                yield [self.by_rank[member] for member in members]

    def _of_other_stage(
        self,
        told: Mapping[tuple[int, int], Mapping[str, Tensor]],
        rank: int,
        micro_batch: int,
        name: str,
    ) -> Tensor | None:
        for peer in sorted(self.view.reach(rank, self.axes("pp"))):
            given = told.get((peer, micro_batch), {})
            if name in given:
                return given[name]
        return None


def says_something(rows: Sequence[Sequence[int]]) -> bool:
    """Whether rows are long and varied enough that equal ones are the same sample."""
    return (
        bool(rows)
        and min(len(row) for row in rows) >= _FEWEST_TOKENS
        and all(len(set(row)) > 1 for row in rows)
    )


def all_rows(fed: Sequence[Fed]) -> list[tuple[int, ...]]:
    """Return the rows of several micro-batches, sorted."""
    return sorted(row for part in fed for row in part.rows)


def count_valid(labels: Tensor) -> int:
    """Return the number of labels that count: those below zero are ignored."""
    return int((labels.to(torch.int64) >= 0).sum())
