"""Every guard is broken on purpose, on real ranks, and its words are pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paralign.errors import LayoutError
from paralign.parallel.context import ContextParallel
from paralign.parallel.context_guards import fingerprint
from paralign.testing import run_on_ranks
from tests.parallel.context_toys import PlainCore, cp_mesh

REFUSES = "context parallel over axis 'cp' (2 ranks) refuses this call of {core}"


class FlagOnly(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return PlainCore().forward(q, k, v, is_causal=is_causal)


class Bare(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PlainCore().forward(q, k, v)


class WithDropout(nn.Module):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0
    ) -> Tensor:
        return PlainCore().forward(q, k, v, mask)


class DropoutModule(PlainCore):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


class WithBias(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return PlainCore().forward(q, k, v)


def _local(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _call(style: ContextParallel, core: nn.Module, *args: Any, **kwargs: Any) -> None:
    style.apply(core, cp_mesh())(*args, **kwargs)


def _odd_heads() -> None:
    _call(ContextParallel(layout="BNSD"), PlainCore(), *(_local(1, 3, 8, 4),) * 3)


def _kv_heads_do_not_divide() -> None:
    kv = _local(1, 3, 8, 4)
    _call(ContextParallel(layout="BNSD"), PlainCore(), _local(1, 4, 8, 4), kv, kv)


def _v_has_other_heads() -> None:
    q = _local(1, 4, 8, 4)
    _call(ContextParallel(layout="BNSD"), PlainCore(), q, q, _local(1, 2, 8, 4))


def _wrong_dims_for_these_tensors() -> None:
    """BSND tensors called BNSD: tokens are taken for heads, and seq_len notices."""
    q = _local(1, 8, 4, 4)
    _call(ContextParallel(layout="BNSD", seq_len=16), PlainCore(), q, q, q)


def _whole_sequence_against_seq_len() -> None:
    q = _local(1, 4, 16, 4)
    _call(ContextParallel(layout="BNSD", seq_len=16), PlainCore(), q, q, q)


def _whole_sequence_against_mask() -> None:
    q = _local(1, 4, 16, 4)
    mask = torch.ones(16, 16, dtype=torch.bool)
    _call(ContextParallel(layout="BNSD"), PlainCore(), q, q, q, mask)


def _other_keys() -> None:
    kv = _local(1, 4, 6, 4)
    _call(ContextParallel(layout="BNSD"), PlainCore(), _local(1, 4, 8, 4), kv, kv)


def _three_dims() -> None:
    q = _local(8, 4, 4)
    _call(ContextParallel(layout="BNSD"), PlainCore(), q, q, q)


def _two_dtypes() -> None:
    q = _local(1, 4, 8, 4)
    _call(ContextParallel(layout="BNSD"), PlainCore(), q, q, q.float())


def _odd_chunks() -> None:
    q = _local(1, 4, 7, 4)
    style = ContextParallel(layout="BNSD", ulysses_degree=1, load_balance=True)
    _call(style, PlainCore(), q, q, q)


def _unknown_tensor() -> None:
    q = _local(1, 4, 8, 4)
    _call(ContextParallel(layout="BNSD"), WithBias(), q, q, q, torch.ones(4))


def _dropout() -> None:
    q = _local(1, 4, 8, 4)
    _call(ContextParallel(layout="BNSD"), WithDropout(), q, q, q, dropout_p=0.1)


def _dropout_module() -> None:
    q = _local(1, 4, 8, 4)
    core = DropoutModule()
    _call(ContextParallel(layout="BNSD"), core.eval(), q, q, q)  # evaluation drops nothing
    _call(ContextParallel(layout="BNSD"), ContextParallel.remove(core).train(), q, q, q)


def _several_problems() -> None:
    q, v = _local(1, 4, 16, 4), _local(1, 2, 16, 4)
    mask = torch.ones(16, 16, dtype=torch.bool)
    _call(ContextParallel(layout="BNSD", seq_len=16), PlainCore(), q, q, v, mask)


def _gather_bare() -> None:
    _call(ContextParallel(layout="BNSD", ulysses_degree=1), Bare())


def _gather_flag_only() -> None:
    q = _local(1, 4, 8, 4)
    _call(ContextParallel(layout="BNSD", ulysses_degree=1), FlagOnly(), q, q, q, is_causal=True)


def _degree_does_not_divide() -> None:
    _call(ContextParallel(layout="BNSD", ulysses_degree=3), PlainCore())


def _balanced_ulysses() -> None:
    _call(ContextParallel(layout="BNSD", load_balance=True), PlainCore())


BROKEN: list[tuple[Callable[[], None], str]] = [
    (
        _odd_heads,
        REFUSES.format(core="PlainCore")
        + ": num_heads=3 does not split evenly over ulysses_degree=2 on axis 'cp' (2 ranks, "
        "remainder 1). Use ulysses_degree in {1} (1 gathers keys and values and splits no "
        "heads), or a number of heads that divides (head_dim=1 of q [1, 3, 8, 4], k [1, 3, 8, "
        "4], v [1, 3, 8, 4])",
    ),
    (
        _kv_heads_do_not_divide,
        REFUSES.format(core="PlainCore")
        + ": num_heads=4 of q is no multiple of num_kv_heads=3 of k and v (remainder 1): each K/V "
        "head must serve equally many query heads, and no replication of K/V heads over the "
        "ranks could make that exact (head_dim=1 of q [1, 4, 8, 4], k [1, 3, 8, 4], v [1, 3, 8, "
        "4])",
    ),
    (
        _v_has_other_heads,
        REFUSES.format(core="PlainCore")
        + ": k has 4 heads and v has 2 (head_dim=1 of q [1, 4, 8, 4], k [1, 4, 8, 4], v [1, 2, 8, "
        "4]); each key head needs its value head. Check that head_dim counts heads",
    ),
    (
        _wrong_dims_for_these_tensors,
        REFUSES.format(core="PlainCore")
        + ": q holds 4 tokens (seq_dim=2 of [1, 8, 4, 4]) on each rank of axis 'cp' (2 ranks), 8 "
        "together, but seq_len=16. Feed each rank its slice of 8 tokens (program.shard does), or "
        "check that seq_dim counts tokens",
    ),
    (
        _whole_sequence_against_seq_len,
        REFUSES.format(core="PlainCore")
        + ": q holds 16 tokens (seq_dim=2 of [1, 4, 16, 4]) on each rank of axis 'cp' (2 ranks), "
        "32 together, but seq_len=16. This is the whole sequence on every rank. Feed each rank "
        "its slice of 8 tokens (program.shard does), or check that seq_dim counts tokens",
    ),
    (
        _whole_sequence_against_mask,
        REFUSES.format(core="PlainCore")
        + ": mask has shape [16, 16], but must be [S, S] or [B or 1, N or 1, S or 1, S] with S=32 "
        "(16 tokens on each rank of axis 'cp' (2 ranks)), B=1 and N=4. The mask fits 16 tokens, "
        "what each rank was fed: either every rank was fed the whole sequence and must be fed "
        "its slice, or the mask was sliced and must be passed whole.",
    ),
    (
        _other_keys,
        REFUSES.format(core="PlainCore")
        + ":\n  - k holds 6 tokens (dim 2 of [1, 4, 6, 4]) and q holds 8 (of [1, 4, 8, 4]). Only "
        "self-attention is supported: q, k and v must be slices of the same tokens\n  - v holds "
        "6 tokens (dim 2 of [1, 4, 6, 4]) and q holds 8 (of [1, 4, 8, 4]). Only self-attention "
        "is supported: q, k and v must be slices of the same tokens",
    ),
    (
        _three_dims,
        REFUSES.format(core="PlainCore")
        + ":\n  - q has shape [8, 4, 4]: 3 dims, but the layouts have 4 (packed THD is not "
        "supported). Unflatten rows or heads first\n  - k has shape [8, 4, 4]: 3 dims, but the "
        "layouts have 4 (packed THD is not supported). Unflatten rows or heads first\n  - v has "
        "shape [8, 4, 4]: 3 dims, but the layouts have 4 (packed THD is not supported). "
        "Unflatten rows or heads first",
    ),
    (
        _two_dtypes,
        REFUSES.format(core="PlainCore")
        + ": q, k and v need one dtype and device, not q torch.float64 on cpu, k torch.float64 on "
        "cpu, v torch.float32 on cpu",
    ),
    (
        _odd_chunks,
        REFUSES.format(core="PlainCore")
        + ": q holds 7 tokens (seq_dim=2 of [1, 4, 7, 4]), which load_balance=True must cut into 2 "
        "equal chunks. Use a global length that is a multiple of 2 * 2",
    ),
    (
        _unknown_tensor,
        REFUSES.format(core="WithBias")
        + ": argument 'slopes' is a tensor of shape [4] that is neither q, k, v nor the mask: "
        "which heads and tokens of it belong to a rank is not known. Apply it before the core, "
        "or name it with mask_kwarg_name if it is the mask",
    ),
    (
        _dropout,
        REFUSES.format(core="WithDropout")
        + ": dropout_p=0.1 inside the core draws a mask per rank, not the one of a single device. "
        "Use 0 here, and drop outside attention",
    ),
    (
        _dropout_module,
        REFUSES.format(core="DropoutModule")
        + ": drop.p=0.5 inside the core draws a mask per rank, not the one of a single device. Use "
        "0 here, and drop outside attention",
    ),
    (
        _several_problems,
        REFUSES.format(core="PlainCore")
        + ":\n  - q holds 16 tokens (seq_dim=2 of [1, 4, 16, 4]) on each rank of axis 'cp' (2 "
        "ranks), 32 together, but seq_len=16. This is the whole sequence on every rank. Feed "
        "each rank its slice of 8 tokens (program.shard does), or check that seq_dim counts "
        "tokens\n  - k has 4 heads and v has 2 (head_dim=1 of q [1, 4, 16, 4], k [1, 4, 16, 4], "
        "v [1, 2, 16, 4]); each key head needs its value head. Check that head_dim counts heads",
    ),
    (
        _gather_bare,
        "Bare.forward(q, k, v) takes neither a mask nor is_causal, so a causal rule inside it "
        "would be built from the shapes of a slice of queries and be wrong with gathered keys "
        "and values. Give it a mask parameter (mask_kwarg_name) or use ulysses_degree=None, "
        "where it sees the whole sequence.",
    ),
    (
        _gather_flag_only,
        "FlagOnly was called with is_causal=True and has no mask parameter, but with gathered "
        "keys and values its queries are a slice of the sequence, so the causal rule must be "
        "passed as a mask. Give forward a mask parameter (mask_kwarg_name), or use "
        "ulysses_degree=None.",
    ),
    (
        _degree_does_not_divide,
        "cannot apply ContextParallel: ulysses_degree=3 must divide axis 'cp' (2 ranks). Use "
        "ulysses_degree in {1, 2}: 2 or None splits heads over the whole axis, 1 gathers keys "
        "and values",
    ),
    (
        _balanced_ulysses,
        "cannot apply ContextParallel: load_balance=True has nothing to balance with "
        "ulysses_degree=None on axis 'cp' (2 ranks): every rank already computes the whole "
        "sequence for its own heads. Leave load_balance out, or use ulysses_degree=1 (gathered "
        "keys and values)",
    ),
]


def _messages() -> list[str]:
    messages = []
    for broken, _ in BROKEN:
        try:
            broken()
        except LayoutError as error:
            messages.append(str(error))
        else:
            messages.append("went through")
    return messages


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    return run_on_ranks(_messages, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("index", range(len(BROKEN)), ids=[b[0].__name__ for b in BROKEN])
def test_a_wrong_call_is_refused_on_every_rank(messages: list[list[str]], index: int):
    for of_rank in messages:
        assert of_rank[index] == BROKEN[index][1]


def _same_tokens(slices: list[int], constant: bool = False, proven: bool = False) -> list[str]:
    """Feed each rank the slice it is told, twice; return what was said."""
    rank, outcome = dist.get_rank(), []
    generator = torch.Generator().manual_seed(slices[rank])
    q, k, v = (torch.randn(1, 4, 8, 4, generator=generator) for _ in range(3))
    if constant:
        q, k, v = (x[:, :, :1].expand_as(x) for x in (q, k, v))
    style = ContextParallel(layout="BNSD").configured(
        ulysses_degree=None, load_balance=False, positions_proven=proven
    )
    core = style.apply(PlainCore(), cp_mesh())
    forward: Any = core.forward
    for _ in range(2):
        try:
            core(q, k, v)
            outcome.append(f"ran, done={forward.proof.done}")
        except LayoutError as error:
            outcome.append(str(error))
    return outcome


@pytest.mark.ranks
def test_the_whole_sequence_on_every_rank_is_seen():
    message = (
        "every rank of axis 'cp' (2 ranks) was fed the same q, k and v of shape [1, 4, 8, 4]: most "
        "likely the whole sequence was given to each of them. Attention would take them for one "
        "sequence of 16 tokens. Feed each rank its slice: x.narrow(seq_dim, rank * 4, 4) with its "
        "labels and positions, or program.shard(batch)."
    )
    assert [found[0] for found in run_on_ranks(_same_tokens, 2, [7, 7])] == [message] * 2


@pytest.mark.ranks
def test_a_slice_given_to_two_ranks_is_seen_by_all():
    for found in run_on_ranks(_same_tokens, 4, [0, 1, 1, 2]):
        assert found[0] == (
            "ranks 1, 2 of axis 'cp' (4 ranks) were fed the same q, k and v of shape [1, 4, 8, 4]: "
            "most likely a slice was repeated. Attention would take them for one sequence of 32 "
            "tokens. Feed each rank its slice: x.narrow(seq_dim, rank * 8, 8) with its labels and "
            "positions, or program.shard(batch)."
        )


@pytest.mark.ranks
def test_only_data_that_can_tell_decides_and_only_once():
    assert run_on_ranks(_same_tokens, 2, [0, 1]) == [["ran, done=True"] * 2] * 2
    # All tokens alike: equal slices are right, and nothing is proven yet.
    assert run_on_ranks(_same_tokens, 2, [7, 7], True) == [["ran, done=False"] * 2] * 2
    # Whoever split the batch has proven the positions.
    assert run_on_ranks(_same_tokens, 2, [7, 7], False, True) == [["ran, done=True"] * 2] * 2


def _fake() -> bool:
    core = ContextParallel(layout="BNSD").apply(PlainCore(), cp_mesh())
    forward: Any = core.forward
    with FakeTensorMode():
        q = torch.randn(1, 4, 8, 4)
    with torch.no_grad():
        forward.proof.check((q, q, q))
    return bool(forward.proof.done)


@pytest.mark.ranks
def test_a_fake_forward_is_not_the_first_real_call():
    assert run_on_ranks(_fake, 2) == [False, False]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
)
def test_a_fingerprint_sees_one_bit_and_the_place_of_a_value(dtype: torch.dtype):
    x = torch.arange(1.0, 25.0).view(2, 3, 4).to(dtype)
    first = int(fingerprint([x]))
    assert first == int(fingerprint([x.clone()]))
    assert first == int(fingerprint([x.transpose(0, 1).contiguous().transpose(0, 1)]))
    changed = x.clone()
    changed[1, 2, 3] = 1
    assert int(fingerprint([changed])) != first
    assert int(fingerprint([x.flip(0)])) != first
    assert int(fingerprint([x, x])) != int(fingerprint([x, changed]))


def _without_guards() -> tuple[int, ...]:
    q = torch.ones(1, 4, 8, 4)
    core = ContextParallel(seq_dim=2, head_dim=3, guards=False).apply(PlainCore(), cp_mesh())
    return tuple(core(q, q, q).shape)


@pytest.mark.ranks
def test_guards_can_be_switched_off_for_experiments():
    assert run_on_ranks(_without_guards, 2) == [(1, 4, 8, 4)] * 2
