"""Chooses small sizes of a model that stand in the same relations as its large ones. Pure.

A number is never scaled: the smallest one is searched for that is split, shared, padded and ordered
as the large one is. So two widths that differ still differ, and what does not divide still does
not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paralign.data.source import NUM_BYTES
from paralign.mesh import Degrees
from paralign.parallel.context_rules import kv_repeats

# Of every family; the order among them is kept. 0 stays: there is none.
WIDTHS = (
    "hidden_size",
    "ffn_hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "expert_hidden_size",
    "shared_hidden_size",
)
_NARROWEST = 8
_MOST_QUERIES = 8  # query heads that share one of keys and values
_MOST_HEADS = 64  # of keys and values
_MOST_CHOICES = 4  # experts of a token
_TRIES = 4096


@dataclass(frozen=True, kw_only=True)
class Split:
    """What the sizes of a model are divided by.

    Attributes:
        degrees: The mesh.
        inner: Ranks of cp that heads are traded over.
    """

    degrees: Degrees
    inner: int


def small_sizes(sizes: Any, large: Split, small: Split) -> dict[str, int]:
    """Return every size but the number of layers.

    Args:
        sizes: Hyper-parameters of a registered model.
        large: What they are divided by now.
        small: What the small ones will be divided by.
    """
    changed: dict[str, int] = {}
    heads, kv_heads = _heads(sizes.num_heads, sizes.num_kv_heads, large, small)
    changed["num_heads"] = heads
    is_latent = hasattr(sizes, "kv_lora_rank")
    if not is_latent:
        changed["num_kv_heads"] = kv_heads
    cuts = _cuts(large.degrees, small.degrees)
    widths = {name: getattr(sizes, name) for name in WIDTHS if getattr(sizes, name, 0)}
    # Where a head's width is not a size of its own, heads divide the hidden size.
    multiples = {} if is_latent else {"hidden_size": heads * min(sizes.head_dim, _NARROWEST)}
    changed |= _narrow(widths, cuts, multiples)
    changed["vocab_size"] = _smallest(
        sizes.vocab_size, cuts, at_least=min(NUM_BYTES, sizes.vocab_size)
    )
    if sizes.has_experts:
        changed |= _experts(sizes, large.degrees, small.degrees)
    return changed


def _cuts(large: Degrees, small: Degrees) -> list[tuple[int, int]]:
    """Return the divisors that a size is looked at with, each with its small counterpart."""
    pairs = [(2, 2), (large.tp, small.tp), (large.fsdp, small.fsdp)]
    return [*pairs, (large.tp * large.fsdp, small.tp * small.fsdp)]


def _alike(small: int, large: int, cuts: list[tuple[int, int]], *, strict: bool) -> bool:
    """Whether ``small`` divides where ``large`` does, and, if ``strict``, nowhere else."""
    for before, after in cuts:
        if after > 1:
            divides, should = small % after == 0, large % before == 0
            if divides != should and (strict or should):
                return False
    return True


def _smallest(
    large: int, cuts: list[tuple[int, int]], *, at_least: int, multiple_of: int = 1
) -> int:
    # What does not divide over many ranks can have no counterpart over two: an even width does.
    for strict in (True, False):
        for small in range(at_least, at_least + _TRIES):
            if small % multiple_of == 0 and _alike(small, large, cuts, strict=strict):
                return small
    return large


def _narrow(
    widths: Mapping[str, int], cuts: list[tuple[int, int]], multiples: Mapping[str, int]
) -> dict[str, int]:
    """Return the widths in the same order, equal where they are equal."""
    small: dict[str, int] = {}
    last = 0, 0
    # The one that is bound to the heads comes first of its equals, which follow it.
    for name in sorted(widths, key=lambda name: (widths[name], name not in multiples)):
        large = widths[name]
        if large != last[0]:
            at_least = max(last[1] + 1, min(_NARROWEST, large))
            chosen = _smallest(large, cuts, at_least=at_least, multiple_of=multiples.get(name, 1))
            last = large, chosen
        small[name] = last[1]
    return small


def _heads(heads: int, kv_heads: int, large: Split, small: Split) -> tuple[int, int]:
    """Return the fewest heads of queries, and of keys and values, that are shared alike."""
    queries = heads // kv_heads
    exact = [queries] if queries <= _MOST_QUERIES else range(4, 2 * _MOST_QUERIES)
    wanted = _sharing(heads, kv_heads, large, small)
    others = range(2, 4 * _MOST_QUERIES) if queries > 1 else exact
    # As many queries to a key as before matters more than one head or several on a rank (the last
    # of the kinds), and whether keys are shared more than either.
    for choices, kinds in ((exact, 4), (exact, 3), (others, 4), (others, 3)):
        for fewer, chosen in itertools.product(range(1, _MOST_HEADS), choices):
            pair = chosen * fewer, fewer
            if _divides(*pair, small) and _sharing(*pair, small, small)[:kinds] == wanted[:kinds]:
                return pair
    for fewer in range(1, kv_heads + 1):
        if _divides(queries * fewer, fewer, small):
            return queries * fewer, fewer
    return heads, kv_heads


def _sharing(heads: int, kv_heads: int, split: Split, kept: Split) -> tuple[bool, ...]:
    """Return how heads meet tp and cp, as far as the small mesh has these axes."""
    tp = split.degrees.tp
    local = max(1, kv_heads // tp)
    return (
        kept.degrees.tp > 1 and kv_heads < tp,
        kept.inner > 1 and kv_repeats(local, split.inner) > 1,
        local > 1,
        heads // tp // split.inner > 1,
    )


def _divides(heads: int, kv_heads: int, split: Split) -> bool:
    tp = split.degrees.tp
    shared = kv_heads % tp == 0 or tp % kv_heads == 0
    return shared and heads % tp == 0 and heads // tp % split.inner == 0


@dataclass(frozen=True, kw_only=True)
class _Routing:
    """Numbers that say where a token can go."""

    num_experts: int
    num_expert_groups: int
    num_limited_groups: int
    top_k: int

    @property
    def reachable(self) -> int:
        """Experts that a token chooses from."""
        return self.num_experts // self.num_expert_groups * self.num_limited_groups

    def is_legal(self, degrees: Degrees) -> bool:
        """Whether groups and ranks of ep get equally many experts, and tokens enough of them."""
        divisor = math.lcm(self.num_expert_groups, degrees.ep)
        return self.num_experts % divisor == 0 and self.top_k <= self.reachable

    def kinds(self, degrees: Degrees, kept: Degrees) -> tuple[bool, ...]:
        """Return how tokens meet experts, as far as the mesh ``kept`` has the axes."""
        here = self.num_experts // degrees.ep
        return (
            here > 1,
            kept.efsdp > 1 and here % degrees.efsdp == 0,
            self.top_k < self.reachable,
            2 * self.top_k <= self.num_experts,
            self.num_experts // self.num_expert_groups > 1,
        )


def _experts(sizes: Any, large: Degrees, small: Degrees) -> dict[str, int]:
    names = _Routing.__dataclass_fields__
    given = _Routing(**{name: getattr(sizes, name) for name in names})
    wanted = given.kinds(large, small)
    groups = min(given.num_expert_groups, 4)
    limited = groups
    if given.num_limited_groups < given.num_expert_groups:
        limited = min(given.num_limited_groups, 2, groups - 1)
    candidates = [
        _Routing(
            num_experts=number,
            num_expert_groups=groups,
            num_limited_groups=limited,
            top_k=min(given.top_k, _MOST_CHOICES),
        )
        for number in range(1, given.num_experts + 1)
    ]
    legal = [routing for routing in candidates if routing.is_legal(small)]
    alike = [routing for routing in legal if routing.kinds(small, small) == wanted]
    chosen = next(iter(alike or legal), given)
    return {name: getattr(chosen, name) for name in names}
