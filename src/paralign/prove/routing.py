"""Router choices of one device, which a run replays, and says where its own would have differed.

::

    reference run   own choices ----------------> routing table: choices and scores of every token
                                                      |  |
    truth run       own choices (kept), sent by  <----'  |
    parallel run    own choices (counted), sent by <-----'

In bfloat16 one or two choices of a hundred fall otherwise on another mesh: two scores that differ
by less than rounding. What such a token then computes has nothing to do with what it computed in
the reference, so gradients part by far more than rounding. With the choices replayed everything
after them is compared like with like: weights still come from the run's own scores, and choices are
compared by themselves, as the discrete things they are.

A token is known by its number in the global batch, so micro-batches, slices of the sequence and
recomputation do not matter. In float64 nothing is replayed: there the choices must be the same.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paralign.loss import Predicted
from paralign.models.router import Router

_FOLDER = ".routing"
_TABLE = "table.safetensors"


def routing_folder(trace: Path) -> Path:
    """Return the folder beside a trace in which its routing is kept."""
    return trace.with_name(trace.name + _FOLDER)


def numbers_of(samples: Tensor, positions: Tensor, seq_len: int) -> Tensor:
    """Number tokens of the global batch.

    Shapes:
        samples: ``[B]``, rows of the global batch. positions: ``[B, S]``, in its sequences.
        returns: ``[B, S]`` int64.
    """
    return samples.to(positions.device).unsqueeze(1) * seq_len + positions


class RoutingTable:
    """Choices and scores that a run on one device has kept."""

    def __init__(self, trace: Path) -> None:
        self._path = routing_folder(trace) / _TABLE

    @property
    def exists(self) -> bool:
        """Whether the run had routers."""
        return self._path.exists()

    def choices(self, step: int, router: str) -> Tensor:
        """Return ``[N, K]`` int64, by the number of the token."""
        return self._read(f"{step}:{router}:choices")

    def scores(self, step: int, router: str) -> Tensor:
        """Return ``[N, E]``: what experts were selected by."""
        return self._read(f"{step}:{router}:scores")

    def _read(self, key: str) -> Tensor:
        with safe_open(str(self._path), framework="pt") as file:
            found: Tensor = file.get_tensor(key)
        return found


class RoutingLog(ABC):
    """Sees every choice of a training step.

    Args:
        routers: The routers of this process, by global name.
        replay: Whose choices tokens are sent by; None: by the run's own.
    """

    def __init__(self, routers: Mapping[str, Router], replay: RoutingTable | None) -> None:
        self._replay = replay
        self._step = -1
        for name, router in routers.items():
            router.decide = partial(self._decide, name)

    def begin_step(self) -> None:
        """Say that what follows belongs to the next optimizer step."""
        self._step += 1

    def _decide(self, router: str, own: Tensor, ranked: Tensor, predicted: Predicted) -> Tensor:
        """Note a router's own choices, and return what its tokens are sent by."""
        if predicted.numbers is None:
            return own
        tokens = predicted.numbers.flatten().cpu()
        self._note(router, tokens, own.flatten(0, 1).cpu(), ranked.flatten(0, 1).cpu())
        if self._replay is None:
            return own
        told = self._replay.choices(self._step, router)[tokens]
        return told.to(own.device).view_as(own)

    @abstractmethod
    def _note(self, router: str, tokens: Tensor, own: Tensor, ranked: Tensor) -> None:
        """Note ``own`` ``[T, K]``, selected by ``ranked`` ``[T, E]``, of tokens by number."""


class RoutingRecorder(RoutingLog):
    """Keeps choices and scores of every token, on one device.

    Args:
        routers: As :class:`RoutingLog`.
        replay: Likewise.
        num_tokens: Tokens of the global batch.
    """

    def __init__(
        self, routers: Mapping[str, Router], replay: RoutingTable | None, *, num_tokens: int
    ) -> None:
        super().__init__(routers, replay)
        self._num_tokens = num_tokens
        self._kept: dict[str, Tensor] = {}

    def _note(self, router: str, tokens: Tensor, own: Tensor, ranked: Tensor) -> None:
        for what, values in (("choices", own), ("scores", ranked)):
            key = f"{self._step}:{router}:{what}"
            if key not in self._kept:
                self._kept[key] = values.new_zeros(self._num_tokens, values.shape[1])
            self._kept[key][tokens] = values

    def write(self, trace: Path) -> None:
        """Keep the table beside ``trace``; nothing where there is no router."""
        if self._kept:
            routing_folder(trace).mkdir(parents=True, exist_ok=True)
            save_file(self._kept, routing_folder(trace) / _TABLE)


class RoutingWatch(RoutingLog):
    """Counts on a rank of a parallel run which of its own choices differ from the reference's.

    Args:
        routers: As :class:`RoutingLog`.
        reference: The reference's table.
        truth: The table of the float64 run, which was sent by the reference's choices as well;
            None: the run is in float64 itself, and nothing is replayed.
    """

    def __init__(
        self, routers: Mapping[str, Router], reference: RoutingTable, truth: RoutingTable | None
    ) -> None:
        super().__init__(routers, None if truth is None else reference)
        self._reference = reference
        self._truth = truth
        self._seen: dict[tuple[int, str], Tensor] = {}
        self._rows: dict[tuple[int, str], dict[str, Any]] = {}

    def _note(self, router: str, tokens: Tensor, own: Tensor, ranked: Tensor) -> None:
        # A recomputed forward is the same tokens once more.
        key = self._step, router
        told = self._reference.choices(*key)
        seen = self._seen.setdefault(key, torch.zeros(len(told), dtype=torch.bool))
        is_new = ~seen[tokens]
        seen[tokens] = True
        tokens, own, ranked = tokens[is_new], own[is_new], ranked[is_new].double()
        told = told[tokens]
        scores = self._reference.scores(*key)[tokens].double()
        base, expected = scores, 0
        if self._truth is not None:
            base = self._truth.scores(*key)[tokens].double()
            expected = count_flipped(self._truth.choices(*key)[tokens], told)
        row = self._rows.setdefault(key, {"step": key[0], "router": router})
        for what, number in {
            "tokens": len(tokens),
            "choices": own.numel(),
            "flipped": count_flipped(own, told),
            "expected": expected,
            "error": float((ranked - base).square().sum()),
            "own_error": float((scores - base).square().sum()),
            "base": float(base.square().sum()),
        }.items():
            row[what] = row.get(what, 0) + number

    def write(self, trace: Path, rank: int) -> None:
        """Keep what was counted beside ``trace``."""
        routing_folder(trace).mkdir(parents=True, exist_ok=True)
        path = routing_folder(trace) / f"rank{rank:05d}.json"
        path.write_text(json.dumps(list(self._rows.values())), encoding="utf-8")


def count_flipped(own: Tensor, told: Tensor) -> int:
    """Count the choices that are not among those told for the same token, in whatever order.

    Shapes:
        own, told: ``[T, K]``.
    """
    return int((own.unsqueeze(2) != told.unsqueeze(1)).all(2).sum())
