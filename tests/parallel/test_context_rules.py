"""Layouts, divisibility and chunks: pure rules, and the words in which they refuse."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paralign.errors import LayoutError
from paralign.parallel.context_rules import (
    LAYOUT_HELP,
    SequencePlan,
    head_problems,
    intervals,
    kv_repeats,
    requirements,
    resolve_dims,
)


@pytest.mark.parametrize(
    ("arguments", "dims"),
    [
        ({"layout": "BNSD"}, (2, 1)),
        ({"layout": "bhsd"}, (2, 1)),
        ({"layout": "BSND"}, (1, 2)),
        ({"layout": "BSHD"}, (1, 2)),
        ({"layout": "SBND"}, (0, 2)),
        ({"layout": "SBHD"}, (0, 2)),
        ({"seq_dim": 2, "head_dim": 1}, (2, 1)),
        ({"seq_dim": -2, "head_dim": -3}, (2, 1)),
        ({"layout": "BSND", "seq_dim": -3}, (1, 2)),
        ({"seq_dim": 2, "head_dim": 3, "guards": False}, (2, 3)),
    ],
)
def test_dims_come_from_a_layout_or_from_dims(arguments: dict[str, Any], dims: tuple[int, int]):
    given = {"layout": None, "seq_dim": None, "head_dim": None} | arguments
    assert resolve_dims(**given) == dims


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "seq_dim=None and head_dim=None do not say where tokens and heads are. Give "
            f"layout='BNSD', 'BSND' or 'SBND', or both dims: {LAYOUT_HELP}.",
        ),
        (
            {"seq_dim": 2},
            "seq_dim=2 and head_dim=None do not say where tokens and heads are. Give "
            f"layout='BNSD', 'BSND' or 'SBND', or both dims: {LAYOUT_HELP}.",
        ),
        (
            {"seq_dim": 2, "head_dim": 3},
            "ContextParallel(seq_dim=2, head_dim=3) is refused: head_dim=3 is the last dim of a "
            "4-D tensor: the features of one head, which attention contracts, so q @ k^T would "
            "become a partial sum on every rank. It must be the dim that counts heads: use "
            f"head_dim=1. {LAYOUT_HELP}.",
        ),
        (
            {"seq_dim": 1, "head_dim": -1},
            "ContextParallel(seq_dim=1, head_dim=-1) is refused: head_dim=-1 is the last dim of a "
            "4-D tensor: the features of one head, which attention contracts, so q @ k^T would "
            "become a partial sum on every rank. It must be the dim that counts heads: use "
            f"head_dim=2. {LAYOUT_HELP}.",
        ),
        (
            {"seq_dim": 1, "head_dim": 1},
            "ContextParallel(seq_dim=1, head_dim=1) is refused: head_dim=1 and seq_dim=1 are the "
            f"same dim; seq_dim counts tokens and head_dim counts heads. {LAYOUT_HELP}.",
        ),
        (
            {"seq_dim": 3, "head_dim": 1},
            "ContextParallel(seq_dim=3, head_dim=1) is refused: seq_dim=3 is the last dim of a 4-D "
            "tensor: the features of one head; it must be the dim that counts tokens. "
            f"{LAYOUT_HELP}.",
        ),
        (
            {"layout": "BNSD", "seq_dim": 1, "head_dim": 2},
            "seq_dim=1 and head_dim=2 contradicts layout='BNSD', which has seq_dim=2, head_dim=1. "
            "Leave the dims out, or name the layout the tensors have.",
        ),
        (
            {"seq_dim": 4, "head_dim": 1},
            f"seq_dim=4 is not a dim of a 4-D tensor; use -4 to 3: {LAYOUT_HELP}.",
        ),
        (
            {"layout": "BNSDX"},
            f"layout='BNSDX' is unknown. Did you mean 'BNSD'? Use one of: {LAYOUT_HELP}.",
        ),
        (
            {"layout": "THD"},
            "layout='THD' (packed sequences without a batch dim) is not supported: splitting it by "
            "tokens would cut documents at places the core cannot see. Unpack it to 'BNSD', 'BSND' "
            "or 'SBND' and pass the document boundaries as a mask.",
        ),
    ],
)
def test_dims_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str):
    given = {"layout": None, "seq_dim": None, "head_dim": None} | arguments
    with pytest.raises(LayoutError) as caught:
        resolve_dims(**given)
    assert str(caught.value) == message


SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "seq_len": 64, "degree": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ulysses_degree": 1, "load_balance": True},
        {"ulysses_degree": 2, "load_balance": True},
        {"ulysses_degree": 4},
        {"num_heads": 12, "num_kv_heads": 3},
        {"num_heads": 3, "num_kv_heads": 3, "ulysses_degree": 1},
        {"degree": 1, "ulysses_degree": 1, "load_balance": True},
        {"degree": 1, "num_heads": 3, "num_kv_heads": 1, "seq_len": 5},
    ],
)
def test_what_can_run_has_no_problems(changes: dict[str, Any]):
    assert requirements(**SIZES | changes) == []


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"num_heads": 6},
            [
                "num_heads=6 does not split evenly over ulysses_degree=4 on axis 'cp' (4 ranks, "
                "remainder 2). Use ulysses_degree in {1, 2} (1 gathers keys and values and splits "
                "no heads), or a number of heads that divides"
            ],
        ),
        (
            {"num_kv_heads": 3, "ulysses_degree": 2},
            [
                "num_heads=8 of q is no multiple of num_kv_heads=3 of k and v (remainder 2): each "
                "K/V head must serve equally many query heads, and no replication of K/V heads "
                "over the ranks could make that exact"
            ],
        ),
        (
            {"seq_len": 66},
            [
                "seq_len=66 does not split evenly over axis 'cp' (4 ranks, remainder 2). Use "
                "seq_len=64 or 68, or pad with ignored labels"
            ],
        ),
        (
            {"seq_len": 4, "ulysses_degree": 1, "load_balance": True},
            [
                "seq_len=4 does not split evenly over axis 'cp' (4 ranks, remainder 4, into 2 * 4 "
                "chunks for load_balance=True). Use seq_len=8, or pad with ignored labels"
            ],
        ),
        (
            {"ulysses_degree": 3, "seq_len": 63},
            [
                "ulysses_degree=3 must divide axis 'cp' (4 ranks). Use ulysses_degree in "
                "{1, 2, 4}: 4 or None splits heads over the whole axis, 1 gathers keys and values",
                "seq_len=63 does not split evenly over axis 'cp' (4 ranks, remainder 3). Use "
                "seq_len=60 or 64, or pad with ignored labels",
            ],
        ),
        (
            {"load_balance": True},
            [
                "load_balance=True has nothing to balance with ulysses_degree=None on axis 'cp' (4 "
                "ranks): every rank already computes the whole sequence for its own heads. Leave "
                "load_balance out, or use ulysses_degree=1 (gathered keys and values)"
            ],
        ),
    ],
)
def test_what_cannot_run_says_why_and_what_to_do(changes: dict[str, Any], problems: list[str]):
    assert requirements(**SIZES | changes) == problems


@pytest.mark.parametrize("degree", [0, -1, True, "2", 1.0])
def test_an_ulysses_degree_that_is_no_divisor_is_refused(degree: Any):
    [problem] = requirements(**SIZES | {"ulysses_degree": degree})
    assert problem.startswith(f"ulysses_degree={degree!r} must divide axis 'cp' (4 ranks)")


def test_repeated_heads_keep_each_query_head_with_its_own():
    checked = 0
    for num_heads in range(1, 25):
        for num_kv_heads in range(1, num_heads + 1):
            for inner in range(1, 9):
                if head_problems(
                    num_heads=num_heads, num_kv_heads=num_kv_heads, degree=inner, inner=inner
                ):
                    continue
                repeats = kv_repeats(num_kv_heads, inner)
                copies = [head for head in range(num_kv_heads) for _ in range(repeats)]
                assert len(copies) % inner == 0
                local_q, local_kv = num_heads // inner, len(copies) // inner
                assert local_q % local_kv == 0
                for head in range(num_heads):
                    rank, local = divmod(head, local_q)
                    met = copies[rank * local_kv + local // (local_q // local_kv)]
                    assert met == head // (num_heads // num_kv_heads)
                    checked += 1
    assert checked > 1000


def test_a_plan_for_head_tail_chunks():
    plan = SequencePlan(degree=4, inner=2, load_balance=True, rank=2)
    assert (plan.outer, plan.outer_index, plan.num_chunks) == (2, 1, 8)
    assert plan.held_by(2) == (2, 5)
    assert plan.after_exchange(1) == (2, 5, 3, 4)
    assert plan.queries == (2, 3, 4, 5)
    assert plan.runs == [(2, 4), (4, 6)]
    assert SequencePlan(degree=4, inner=2, load_balance=False, rank=2).runs == [(2, 4)]


def test_intervals_refuse_what_does_not_split():
    assert intervals(16, 2, 1, True) == [(4, 8), (8, 12)]
    with pytest.raises(LayoutError) as caught:
        intervals(10, 4, 4, True)
    assert str(caught.value) == (
        "cannot split the sequence:\n"
        "  - rank=4 is not one of the 4 ranks of the axis\n"
        "  - seq_len=10 does not split evenly into 8 chunks (degree=4, load_balance=True): "
        "remainder 2. Pad it to 16"
    )


def test_the_rules_need_no_torch():
    code = "import sys, paralign.parallel.context_rules; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
