"""Context parallel equals one device: output and all gradients, in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from paralign.errors import LayoutError, MeshError
from paralign.parallel.context import ContextParallel, split_sequence_indices
from paralign.testing import run_on_ranks
from tests.parallel.context_toys import (
    BUDGET,
    SEQ_LEN,
    WIDTH,
    Case,
    PlainCore,
    build_tensors,
    cp_mesh,
    measure,
    relative_error,
)

# ulysses_degree, load_balance
MODES: dict[int, list[tuple[int | None, bool]]] = {
    1: [(None, False), (1, False), (1, True)],
    2: [(None, False), (1, False), (1, True)],
    4: [(None, False), (1, False), (1, True), (2, False), (2, True)],
}
MASKS = ("none", "causal", "window", "per_head", "additive", "padding")


def _cases() -> list[Case]:
    """Every mode with every mask; layouts, K/V heads and value widths take turns over them."""
    layouts = itertools.cycle(["BNSD", "BSND", "SBND"])
    kv_heads = itertools.cycle([2, 4, 1, 2])  # 2 and 1 are fewer than 4 ranks
    widths = itertools.cycle([WIDTH, WIDTH, 5])
    return [
        Case(
            cp=cp,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            mask=mask,
            layout=next(layouts),
            num_kv_heads=next(kv_heads),
            value_width=next(widths),
        )
        for cp, modes in MODES.items()
        for ulysses_degree, load_balance in modes
        for mask in MASKS
    ]


CASES = _cases()


def _measure_all(cases: list[Case]) -> list[dict[str, float]]:
    mesh = cp_mesh()
    return [measure(case, mesh) for case in cases]


@pytest.fixture(scope="module")
def errors() -> dict[Case, list[dict[str, float]]]:
    """Run all cases of one world size in one world; errors of each rank by case."""
    found: dict[Case, list[dict[str, float]]] = {}
    for cp in MODES:
        cases = [case for case in CASES if case.cp == cp]
        by_rank = run_on_ranks(_measure_all, cp, cases)
        found |= dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_device(errors: dict[Case, list[dict[str, float]]], case: Case):
    assert len(errors[case]) == case.cp
    for rank, of_rank in enumerate(errors[case]):
        for name, error in of_rank.items():
            assert error <= BUDGET, f"rank {rank}: {name} is off by {error:.1e}"


def test_the_cases_cover_every_pair_that_matters():
    combinations = {(c.cp, c.layout) for c in CASES} | {(c.cp, c.num_kv_heads) for c in CASES}
    assert combinations >= set(itertools.product(MODES, ["BNSD", "BSND", "SBND"]))
    assert combinations >= set(itertools.product(MODES, [1, 2, 4]))
    assert any(c.cp == 4 and c.ulysses_degree is None and c.num_kv_heads == 2 for c in CASES)
    assert any(c.load_balance and c.value_width != WIDTH for c in CASES)


def _change_token_of_rank_0(case: Case) -> float:
    mesh, rank = cp_mesh(), dist.get_rank()
    core = ContextParallel(
        layout="BNSD", ulysses_degree=case.ulysses_degree, load_balance=case.load_balance
    ).apply(PlainCore(), mesh)
    held = split_sequence_indices(SEQ_LEN, case.cp, rank, load_balance=case.load_balance)
    q, k, v = (x[:, :, held] for x in build_tensors(case)[:3])
    before = core(q, k, v)
    if rank == 0:
        k, v = k.clone(), v.clone()
        k[:, :, 0] += 1
        v[:, :, 0] -= 1
    return float((core(q, k, v) - before).abs().amax(dim=(0, 1, 3)).min())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        Case(cp=2),
        Case(cp=2, ulysses_degree=1),
        Case(cp=2, ulysses_degree=1, load_balance=True),
        Case(cp=4, ulysses_degree=2),
    ],
    ids=str,
)
def test_a_token_of_rank_0_reaches_every_output_of_every_rank(case: Case):
    changes = run_on_ranks(_change_token_of_rank_0, case.cp, case)
    assert min(changes) > 1e-6, changes


def _count_work(ulysses_degree: int, load_balance: bool) -> list[tuple[int, int]]:
    mesh, rank = cp_mesh(), dist.get_rank()
    case = Case(cp=mesh.size())
    plain = PlainCore()
    style = ContextParallel(layout="BNSD", ulysses_degree=ulysses_degree, load_balance=load_balance)
    held = split_sequence_indices(SEQ_LEN, case.cp, rank, load_balance=load_balance)
    q, k, v = (x[:, :, held] for x in build_tensors(case)[:3])
    style.apply(plain, mesh)(q, k, v, is_causal=True)
    return plain.calls


@pytest.mark.ranks
def test_head_tail_chunks_give_every_rank_the_same_share_of_the_causal_triangle():
    balanced = run_on_ranks(_count_work, 4, 1, True)
    assert balanced[0] == [(2, 2), (2, 16)]  # chunk 0 sees one chunk of keys, chunk 7 all eight
    assert balanced[3] == [(2, 8), (2, 10)]
    work = [sum(queries * keys for queries, keys in calls) for calls in balanced]
    assert work == [36, 36, 36, 36]  # of 16 * 16 / 4 = 64 without cropping: (2 cp + 1) / (4 cp)

    in_order = run_on_ranks(_count_work, 4, 1, False)
    assert in_order == [[(4, 4)], [(4, 8)], [(4, 12)], [(4, 16)]]

    hybrid = run_on_ranks(_count_work, 4, 2, True)
    assert hybrid == [[(4, 4), (4, 16)]] * 2 + [[(4, 8), (4, 12)]] * 2


def _hybrid_inside_a_larger_world() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
    case = Case(cp=4, ulysses_degree=2, load_balance=True, num_kv_heads=1, mask="causal")
    return measure(case, mesh["cp"])


@pytest.mark.ranks
def test_hybrid_splits_its_axis_of_a_mesh_with_other_axes():
    for of_rank in run_on_ranks(_hybrid_inside_a_larger_world, 8):
        assert max(of_rank.values()) <= BUDGET, of_rank
        assert len(of_rank) == 4


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = PlainCore()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = self.core(q, k, v, is_causal=True)
        return output


def _in_a_plan_and_removed() -> tuple[float, bool, str, list[str]]:
    mesh, case = cp_mesh(), Case(cp=2)
    tensors = build_tensors(case)
    wanted = _Layer()(*tensors[:3])
    held = split_sequence_indices(SEQ_LEN, 2, dist.get_rank())
    layer = _Layer()
    parallelize_module(layer, mesh, {"core": ContextParallel(layout="BNSD")})
    found = layer(*(x[:, :, held] for x in tensors[:3]))
    messages = []
    for broken in (
        lambda: ContextParallel(layout="BNSD").apply(layer.core, mesh),
        lambda: ContextParallel.remove(layer),
        lambda: ContextParallel(layout="BNSD").apply(
            PlainCore(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        ),
    ):
        try:
            broken()
        except (LayoutError, MeshError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    ContextParallel.remove(layer.core)
    restored = "forward" not in vars(layer.core) and torch.equal(layer(*tensors[:3]), wanted)
    names = ", ".join(name for name, _ in layer.named_modules())
    return relative_error(found, wanted[:, :, held]), restored, names, messages


@pytest.mark.ranks
def test_works_in_a_parallelize_plan_and_can_be_taken_away_again():
    for error, restored, names, messages in run_on_ranks(_in_a_plan_and_removed, 2):
        assert error <= BUDGET
        assert restored
        assert names == ", core"  # no wrapper in the module tree
        assert messages == [
            "LayoutError: PlainCore is wrapped by ContextParallel already; wrapping it again would "
            "exchange slices twice. Call ContextParallel.remove(module) first.",
            "LayoutError: _Layer is not wrapped by ContextParallel.",
            "MeshError: ContextParallel needs the 1-D mesh of one axis that this rank is in, not "
            "one of axes ('dp', 'cp') and shape (1, 2). Pass mesh['cp'].",
        ]


def _on_meta() -> tuple[tuple[int, ...], bool]:
    core = ContextParallel(layout="BNSD").apply(PlainCore(), cp_mesh())
    q = torch.empty(2, 4, 8, 6, device="meta")
    output = core(q, q[:, :2], q[:, :2, :, :5])
    forward: Any = core.forward
    return tuple(output.shape), forward.proof.done


@pytest.mark.ranks
def test_shapes_can_be_inferred_without_data_and_prove_nothing():
    assert run_on_ranks(_on_meta, 2) == [((2, 4, 8, 5), False)] * 2


def test_split_sequence_indices_cover_the_sequence_once():
    for degree, load_balance in itertools.product([1, 2, 4], [False, True]):
        slices = [
            split_sequence_indices(16, degree, rank, load_balance=load_balance)
            for rank in range(degree)
        ]
        assert torch.equal(torch.cat(slices).sort().values, torch.arange(16))
    assert split_sequence_indices(8, 2, 0, load_balance=True).tolist() == [0, 1, 6, 7]
    assert split_sequence_indices(8, 2, 1, load_balance=True).tolist() == [2, 3, 4, 5]
    assert split_sequence_indices(8, 2, 1).tolist() == [4, 5, 6, 7]
    assert split_sequence_indices(8, 2, 1).dtype == torch.int64


def test_a_style_can_be_configured_for_a_run_and_says_what_it_is():
    style = ContextParallel(layout="BSHD", mask_kwarg_name="bias")
    run = style.configured(ulysses_degree=1, load_balance=True, seq_len=32, positions_proven=True)
    assert (run.seq_dim, run.head_dim) == (1, 2)
    assert repr(run) == (
        "ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1, qkv_indices=(0, 1, 2), "
        "qkv_kwarg_names=(), mask_kwarg_name='bias', load_balance=True, seq_len=32, guards=True, "
        "positions_proven=True)"
    )
    assert "ulysses_degree=None" in repr(style)  # the original is unchanged
