"""What context parallel can do, as pure functions of sizes: nothing here needs torch or ranks.

``paralign check`` calls :func:`requirements`; the rest says which dims a layout has, which chunks
of the sequence a rank holds, and which of them it answers for in attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from paralign.errors import LayoutError
from paralign.mesh import divisors

# Layout -> (seq_dim, head_dim) of a 4-D tensor; the last dim holds the features of one head.
LAYOUTS = {
    "BNSD": (2, 1),
    "BHSD": (2, 1),
    "BSND": (1, 2),
    "BSHD": (1, 2),
    "SBND": (0, 2),
    "SBHD": (0, 2),
}
NUM_DIMS = 4
LAYOUT_HELP = (
    "BNSD (= BHSD) has seq_dim=2, head_dim=1; BSND (= BSHD) has seq_dim=1, head_dim=2; "
    "SBND (= SBHD) has seq_dim=0, head_dim=2"
)


def resolve_dims(
    layout: str | None, seq_dim: int | None, head_dim: int | None, *, guards: bool = True
) -> tuple[int, int]:
    """Return ``(seq_dim, head_dim)``, counted from the front, from a layout's name or from dims.

    Args:
        layout: One of :data:`LAYOUTS`, or None when both dims are given.
        seq_dim: Dim that counts tokens; negative counts from the end.
        head_dim: Dim that counts heads; negative counts from the end.
        guards: False accepts dims that attention cannot work with; for experiments only.

    Raises:
        LayoutError: The layout is unknown or packed, neither is given, they contradict each other,
            a dim is out of range, both are the same, or one is the feature dim.
    """
    if layout is None and (seq_dim is None or head_dim is None):
        raise LayoutError(
            f"seq_dim={seq_dim} and head_dim={head_dim} do not say where tokens and heads are. "
            f"Give layout='BNSD', 'BSND' or 'SBND', or both dims: {LAYOUT_HELP}."
        )
    expected = _layout_dims(layout) if layout is not None else None
    given = {"seq_dim": seq_dim, "head_dim": head_dim}
    dims = {name: _normalise(name, dim) for name, dim in given.items() if dim is not None}
    if expected is not None:
        _check_no_contradiction(str(layout), expected, given, dims)
        return expected
    if guards:
        _check_dims(dims["seq_dim"], dims["head_dim"], given)
    return dims["seq_dim"], dims["head_dim"]


def _layout_dims(layout: str) -> tuple[int, int]:
    name = layout.upper() if isinstance(layout, str) else str(layout)
    if name in ("THD", "TND"):
        raise LayoutError(
            f"layout={layout!r} (packed sequences without a batch dim) is not supported: splitting "
            "it by tokens would cut documents at places the core cannot see. Unpack it to 'BNSD', "
            "'BSND' or 'SBND' and pass the document boundaries as a mask."
        )
    if name not in LAYOUTS:
        near = get_close_matches(name, LAYOUTS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"layout={layout!r} is unknown.{hint} Use one of: {LAYOUT_HELP}.")
    return LAYOUTS[name]


def _normalise(name: str, dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -NUM_DIMS <= dim < NUM_DIMS:
        raise LayoutError(
            f"{name}={dim!r} is not a dim of a {NUM_DIMS}-D tensor; use {-NUM_DIMS} to "
            f"{NUM_DIMS - 1}: {LAYOUT_HELP}."
        )
    return dim % NUM_DIMS


def _check_no_contradiction(
    layout: str,
    expected: tuple[int, int],
    given: dict[str, int | None],
    dims: dict[str, int],
) -> None:
    wanted = dict(zip(("seq_dim", "head_dim"), expected, strict=True))
    wrong = [f"{name}={given[name]}" for name, dim in dims.items() if dim != wanted[name]]
    if wrong:
        raise LayoutError(
            f"{' and '.join(wrong)} contradicts layout={layout!r}, which has "
            f"seq_dim={expected[0]}, head_dim={expected[1]}. Leave the dims out, or name the "
            "layout the tensors have."
        )


def _check_dims(seq_dim: int, head_dim: int, given: dict[str, int | None]) -> None:
    problems = []
    if seq_dim == head_dim:
        problems.append(
            f"head_dim={given['head_dim']} and seq_dim={given['seq_dim']} are the same dim; "
            "seq_dim counts tokens and head_dim counts heads"
        )
    if head_dim == NUM_DIMS - 1:
        fix = {2: 1, 1: 2, 0: 2}.get(seq_dim)
        problems.append(
            f"head_dim={given['head_dim']} is the last dim of a 4-D tensor: the features of one "
            "head, which attention contracts, so q @ k^T would become a partial sum on every rank. "
            "It must be the dim that counts heads"
            + (f": use head_dim={fix}" if fix is not None else "")
        )
    if seq_dim == NUM_DIMS - 1:
        problems.append(
            f"seq_dim={given['seq_dim']} is the last dim of a 4-D tensor: the features of one "
            "head; it must be the dim that counts tokens"
        )
    if problems:
        title = (
            f"ContextParallel(seq_dim={given['seq_dim']}, head_dim={given['head_dim']}) is refused"
        )
        problems[-1] += f". {LAYOUT_HELP}."
        raise LayoutError.from_problems(title, problems)


def inner_degree(degree: int, ulysses_degree: int | None) -> int:
    """Return over how many ranks heads are split; ``ulysses_degree=None`` is the whole axis."""
    return degree if ulysses_degree is None else ulysses_degree


def requirements(
    *,
    num_heads: int,
    num_kv_heads: int,
    seq_len: int,
    degree: int,
    ulysses_degree: int | None = None,
    load_balance: bool = False,
    axis: str = "cp",
) -> list[str]:
    """List everything that stops attention of these sizes from running over ``degree`` ranks.

    Args:
        num_heads: Query heads on one tensor-parallel rank.
        num_kv_heads: Key and value heads on one tensor-parallel rank.
        seq_len: Global sequence length.
        degree: Ranks of the context-parallel axis.
        ulysses_degree: See ``ContextParallel``.
        load_balance: See ``ContextParallel``.
        axis: Name of the axis, for the messages.

    Returns:
        One sentence for each problem, with the fix; empty when it can run.
    """
    problems = mode_problems(
        degree=degree, ulysses_degree=ulysses_degree, load_balance=load_balance, axis=axis
    )
    num_chunks = degree * (2 if load_balance else 1)
    if remainder := seq_len % num_chunks:
        chunks = f", into 2 * {degree} chunks for load_balance=True" if load_balance else ""
        near = [str(n) for n in (seq_len - remainder, seq_len - remainder + num_chunks) if n]
        problems.append(
            f"seq_len={seq_len} does not split evenly over axis {axis!r} ({degree} ranks, "
            f"remainder {remainder}{chunks}). Use seq_len={' or '.join(near)}, or pad with ignored "
            "labels"
        )
    if not problems:
        problems += head_problems(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            degree=degree,
            inner=inner_degree(degree, ulysses_degree),
            axis=axis,
        )
    return problems


def mode_problems(
    *, degree: int, ulysses_degree: int | None, load_balance: bool, axis: str = "cp"
) -> list[str]:
    """List what is wrong with the mode: ``ulysses_degree`` and ``load_balance`` on this axis."""
    problems = []
    if ulysses_degree is not None and not _is_divisor(ulysses_degree, degree):
        choices = ", ".join(str(d) for d in divisors(degree))
        problems.append(
            f"ulysses_degree={ulysses_degree!r} must divide axis {axis!r} ({degree} ranks). Use "
            f"ulysses_degree in {{{choices}}}: {degree} or None splits heads over the whole axis, "
            "1 gathers keys and values"
        )
    elif load_balance and ulysses_degree != 1 and inner_degree(degree, ulysses_degree) == degree:
        problems.append(
            f"load_balance=True has nothing to balance with ulysses_degree={ulysses_degree} on "
            f"axis {axis!r} ({degree} ranks): every rank already computes the whole sequence for "
            "its own heads. Leave load_balance out, or use ulysses_degree=1 (gathered keys and "
            "values)"
        )
    return problems


def head_problems(
    *, num_heads: int, num_kv_heads: int, degree: int, inner: int, axis: str = "cp"
) -> list[str]:
    """List what keeps heads from being split over ``inner`` ranks, each with its own K/V head."""
    problems = []
    if num_heads % num_kv_heads:
        problems.append(
            f"num_heads={num_heads} of q is no multiple of num_kv_heads={num_kv_heads} of k and v "
            f"(remainder {num_heads % num_kv_heads}): each K/V head must serve equally many query "
            "heads, and no replication of K/V heads over the ranks could make that exact"
        )
    if num_heads % inner:
        choices = ", ".join(str(d) for d in divisors(degree) if num_heads % d == 0)
        problems.append(
            f"num_heads={num_heads} does not split evenly over ulysses_degree={inner} on axis "
            f"{axis!r} ({degree} ranks, remainder {num_heads % inner}). Use ulysses_degree in "
            f"{{{choices}}} (1 gathers keys and values and splits no heads), or a number of heads "
            "that divides"
        )
    return problems


def kv_repeats(num_kv_heads: int, inner: int) -> int:
    """Return how often each K/V head is repeated before heads are split over ``inner`` ranks.

    With ``r = inner / gcd(inner, num_kv_heads)`` there are ``lcm(inner, num_kv_heads)`` heads: the
    fewest that split evenly. Where ``num_heads`` is a multiple of both (see :func:`head_problems`)
    it is a multiple of that too, so each query head meets its own K/V head and no other.
    """
    return inner // math.gcd(inner, num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Which chunks of the sequence a rank holds, and which it answers for in attention.

    The axis of ``degree`` ranks is read as ``degree / inner`` groups of ``inner`` ranks, inner
    index fastest. With ``load_balance`` rank r holds one early and one late chunk, so that causal
    attention is the same work on every rank; for 4 ranks::

        chunk     0  1  2  3  4  5  6  7
        rank      0  1  2  3  3  2  1  0
    """

    degree: int
    inner: int
    load_balance: bool
    rank: int

    @property
    def outer(self) -> int:
        """Ranks that keys and values are gathered over."""
        return self.degree // self.inner

    @property
    def outer_index(self) -> int:
        """This rank's place among them."""
        return self.rank // self.inner

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole sequence, all equally long."""
        return self.degree * (2 if self.load_balance else 1)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that ``rank`` holds, in its memory order."""
        return (rank, self.num_chunks - 1 - rank) if self.load_balance else (rank,)

    def after_exchange(self, outer_index: int) -> tuple[int, ...]:
        """Return the chunks of group ``outer_index``, as the all-to-all concatenates them."""
        first = outer_index * self.inner
        ranks = range(first, first + self.inner)
        return tuple(chunk for rank in ranks for chunk in self.held_by(rank))

    @property
    def queries(self) -> tuple[int, ...]:
        """Chunks whose queries this rank answers for, in global order."""
        return tuple(sorted(self.after_exchange(self.outer_index)))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return :attr:`queries` as contiguous ``(first, stop)``: one run, or head and tail."""
        if not self.load_balance:
            return [(self.queries[0], self.queries[-1] + 1)]
        half = len(self.queries) // 2
        head, tail = self.queries[:half], self.queries[half:]
        return [(head[0], head[-1] + 1), (tail[0], tail[-1] + 1)]


def intervals(seq_len: int, degree: int, rank: int, load_balance: bool) -> list[tuple[int, int]]:
    """Return the global ``(start, stop)`` positions that ``rank`` holds, in memory order.

    Raises:
        LayoutError: ``seq_len`` does not split into the chunks, or ``rank`` is not one of
            ``degree``.
    """
    plan = SequencePlan(degree=degree, inner=1, load_balance=load_balance, rank=rank)
    problems = []
    if not 0 <= rank < degree:
        problems.append(f"rank={rank} is not one of the {degree} ranks of the axis")
    if seq_len % plan.num_chunks:
        problems.append(
            f"seq_len={seq_len} does not split evenly into {plan.num_chunks} chunks "
            f"(degree={degree}, load_balance={load_balance}): remainder "
            f"{seq_len % plan.num_chunks}. Pad it to {seq_len + -seq_len % plan.num_chunks}"
        )
    if problems:
        raise LayoutError.from_problems("cannot split the sequence", problems)
    size = seq_len // plan.num_chunks
    return [(chunk * size, (chunk + 1) * size) for chunk in plan.held_by(rank)]


def order_of(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return where each chunk of ``wanted`` is in ``held``."""
    place = {chunk: index for index, chunk in enumerate(held)}
    return [place[chunk] for chunk in wanted]


def _is_divisor(number: object, of: int) -> bool:
    return (
        isinstance(number, int) and not isinstance(number, bool) and number > 0 and of % number == 0
    )
