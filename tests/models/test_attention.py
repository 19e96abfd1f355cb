"""The attention core against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paralign.errors import LayoutError
from paralign.models.attention import CausalAttention


def qkv(heads=4, kv_heads=2, queries=6, v_width=8) -> tuple[Tensor, Tensor, Tensor]:
    keys, width = 6, 8
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return (
        draw(2, heads, queries, width),
        draw(2, kv_heads, keys, width),
        draw(2, kv_heads, keys, v_width),
    )


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bnsd,bntd->bnst", q, k) * scale
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bnst,bntd->bnsd", weights, v)


def triangle(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def check_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("v_width", [8, 5])
def test_causal_attention_with_grouped_heads(kv_heads, v_width):
    q, k, v = qkv(kv_heads=kv_heads, v_width=v_width)
    out = CausalAttention()(q, k, v)
    assert out.shape == (2, 4, 6, v_width)
    check_close(out, formula(q, k, v, triangle(6)))


def test_each_key_head_serves_neighbouring_query_heads():
    q, k, v = qkv(heads=4, kv_heads=2)
    changed = v.clone()
    changed[:, 1] += 1
    differs = (CausalAttention()(q, k, v) != CausalAttention()(q, k, changed)).flatten(2).any(-1)
    assert differs.tolist() == [[False, False, True, True]] * 2


def test_later_tokens_do_not_matter():
    q, k, v = qkv()
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 4:], v2[:, :, 4:] = 9.0, 9.0
    first, second = CausalAttention()(q, k, v), CausalAttention()(q, k2, v2)
    check_close(first[:, :, :4], second[:, :, :4])
    assert bool((first[:, :, 4:] != second[:, :, 4:]).all())


def test_mask_narrows_the_causal_triangle():
    q, k, v = qkv()
    documents = torch.tensor([0, 0, 1, 1, 1, 2])
    same = documents.unsqueeze(0) == documents.unsqueeze(1)
    expected = formula(q, k, v, same & triangle(6))
    check_close(CausalAttention()(q, k, v, mask=same), expected)
    added = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~same, -math.inf)
    check_close(CausalAttention()(q, k, v, mask=added), expected)


def test_mask_alone_rules_without_is_causal():
    q, k, v = qkv(queries=3)
    visible = torch.tensor([[1, 1, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    out = CausalAttention()(q, k, v, mask=visible, is_causal=False)
    check_close(out, formula(q, k, v, visible))


def test_without_mask_and_is_causal_everything_is_seen():
    q, k, v = qkv(queries=3)
    out = CausalAttention()(q, k, v, is_causal=False)
    check_close(out, formula(q, k, v, torch.ones(3, 6, dtype=torch.bool)))


def test_scale_can_be_set():
    q, k, v = qkv()
    check_close(CausalAttention(scale=0.5)(q, k, v), formula(q, k, v, triangle(6), scale=0.5))


def test_is_causal_with_other_keys_than_queries_is_refused():
    q, k, v = qkv(queries=3)
    with pytest.raises(LayoutError) as error:
        CausalAttention()(q, k, v)
    assert str(error.value) == (
        "is_causal=True needs the same tokens on both sides, but there are 3 queries and 6 keys. "
        "Pass is_causal=False and a mask of shape [3, 6]."
    )


def test_heads_that_do_not_divide_are_refused():
    q, k, v = qkv(heads=4, kv_heads=3)
    with pytest.raises(LayoutError) as error:
        CausalAttention()(q, k, v)
    assert str(error.value) == (
        "4 query heads, 3 key heads and 3 value heads: keys and values need equally many heads, "
        "and a divisor of the query heads. Shapes (BNSD): q (2, 4, 6, 8), k (2, 3, 6, 8), "
        "v (2, 3, 6, 8)."
    )
    with pytest.raises(LayoutError, match="4 query heads, 2 key heads and 1 value heads"):
        CausalAttention()(q, k[:, :2], v[:, :1])
