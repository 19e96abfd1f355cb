"""Masks are checked against the global sequence and sliced, never dropped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paralign.errors import LayoutError
from paralign.parallel.context_masks import (
    causal_rows,
    check_mask_is_causal,
    mask_problems,
    select_heads,
    select_rows,
)


def problems(mask: object) -> list[str]:
    return mask_problems(
        mask, batch=2, head_counts=[4, 8], seq_len=16, local_len=8, axis="axis 'cp' (2 ranks)"
    )


@pytest.mark.parametrize(
    "shape",
    [(16, 16), (1, 1, 16, 16), (2, 1, 16, 16), (2, 4, 16, 16), (1, 8, 16, 16), (2, 1, 1, 16)],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_global_masks_are_accepted(shape: tuple[int, ...], dtype: torch.dtype):
    assert problems(torch.zeros(shape, dtype=dtype)) == []


@pytest.mark.parametrize(
    "shape", [(8, 16), (2, 16), (16,), (2, 16, 16), (3, 1, 16, 16), (2, 3, 16, 16), (2, 1, 16, 1)]
)
def test_masks_of_another_shape_are_refused(shape: tuple[int, ...]):
    assert problems(torch.zeros(shape)) == [
        f"mask has shape {list(shape)}, but must be [S, S] or [B or 1, N or 1, S or 1, S] with "
        "S=16 (8 tokens on each rank of axis 'cp' (2 ranks)), B=2 and N=4 or 8."
    ]


def test_a_mask_of_the_local_length_names_both_possible_mistakes():
    [problem] = problems(torch.zeros(8, 8))
    assert problem.endswith(
        "The mask fits 8 tokens, what each rank was fed: either every rank was fed the whole "
        "sequence and must be fed its slice, or the mask was sliced and must be passed whole."
    )


def test_a_mask_of_another_kind_is_refused():
    assert problems("causal") == [
        "mask is a str, not a tensor; pass a tensor [S, S] or [B or 1, N or 1, S or 1, S]"
    ]
    assert problems(torch.zeros(16, 16, dtype=torch.int64)) == [
        "mask has dtype torch.int64; pass bool (True: may attend) or floating point"
    ]


def test_heads_and_rows_are_cut_out():
    mask = torch.arange(2 * 4 * 8 * 8).view(2, 4, 8, 8)
    assert torch.equal(select_heads(mask, first=2, count=2), mask[:, 2:4])
    assert torch.equal(select_heads(mask[:, :1], first=2, count=2), mask[:, :1])
    assert torch.equal(select_heads(mask[0, 0], first=2, count=2), mask[0, 0])
    assert torch.equal(select_rows(mask, [(2, 4), (6, 7)]), mask[:, :, [2, 3, 6]])
    assert torch.equal(select_rows(mask[0, 0], [(2, 4)]), mask[0, 0, 2:4])
    assert torch.equal(select_rows(mask[:, :, :1], [(2, 4)]), mask[:, :, :1])


def test_causal_rows_are_rows_of_the_triangle():
    triangle = torch.ones(8, 8, dtype=torch.bool).tril()
    for start, stop in ((0, 8), (0, 3), (3, 5), (6, 8)):
        rows = causal_rows(start, stop, device=torch.device("cpu"))
        assert torch.equal(rows, triangle[start:stop, :stop])


def _causal(dtype: torch.dtype) -> Tensor:
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    if dtype == torch.bool:
        return triangle
    return torch.zeros(4, 4, dtype=dtype).masked_fill(~triangle, float("-inf"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_beside_is_causal_must_hide_later_keys_itself(dtype: torch.dtype):
    check_mask_is_causal(_causal(dtype), core="Core")
    check_mask_is_causal(_causal(dtype)[None, None], core="Core")
    showing = _causal(dtype).clone()
    showing[0, 3] = True if dtype == torch.bool else 0.0
    with pytest.raises(LayoutError) as caught:
        check_mask_is_causal(showing, core="Core")
    assert str(caught.value) == (
        "Core was called with is_causal=True and a mask of shape [4, 4] that shows keys after "
        "their query. Where keys and values are gathered, queries are a slice, and cores disagree "
        "on what both together mean. Put the causal rule into the mask, mask & torch.ones(S, S, "
        "dtype=torch.bool).tril(), and pass is_causal=False."
    )
