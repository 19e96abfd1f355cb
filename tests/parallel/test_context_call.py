"""Arguments of a core are found as Python binds them, and replaced in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.errors import LayoutError
from paralign.parallel.context_call import CoreSignature

Q, K, V, MASK = (torch.full((2, 2), float(i)) for i in range(4))


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> tuple[Any, ...]:
    return q, k, v, attn_mask, dropout_p, is_causal


def causal_by_default(
    x: int, query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None, causal: bool = True
) -> tuple[Any, ...]:
    return x, query, key, value, mask, causal


def open_ended(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def signature(forward: Callable[..., Any], **options: Any) -> CoreSignature:
    defaults = {"qkv_indices": (0, 1, 2), "qkv_kwarg_names": (), "mask_kwarg_name": None}
    return CoreSignature(forward, core="Core", **defaults | options)


def test_a_default_counts_like_an_argument():
    from_default = signature(causal_by_default, qkv_indices=(1, 2, 3)).read((0, Q, K, V), {})
    assert from_default.is_causal
    assert from_default.mask is None
    passed = signature(causal_by_default, qkv_indices=(1, 2, 3)).read(
        (0, Q, K, V), {"causal": False}
    )
    assert not passed.is_causal


def test_arguments_are_found_by_place_and_by_name():
    reader = signature(sdpa)
    for args, kwargs in (
        ((Q, K, V, MASK, 0.1, True), {}),
        ((Q, K, V, MASK), {"is_causal": True, "dropout_p": 0.1}),
        ((Q,), {"v": V, "k": K, "attn_mask": MASK, "is_causal": True, "dropout_p": 0.1}),
    ):
        call = reader.read(args, dict(kwargs))
        assert [x.sum() for x in call.qkv] == [Q.sum(), K.sum(), V.sum()]
        assert call.mask is MASK
        assert call.is_causal
        assert call.dropout == {"dropout_p": 0.1}
        new_args, new_kwargs = call.replaced((V, Q, K), mask=Q, is_causal=False)
        assert sdpa(*new_args, **new_kwargs) == (V, Q, K, Q, 0.1, False)
        same_args, same_kwargs = call.replaced((Q, K, V))
        assert sdpa(*same_args, **same_kwargs) == (Q, K, V, MASK, 0.1, True)


def test_a_mask_that_was_not_passed_can_be_added():
    call = signature(sdpa).read((Q, K, V, None), {})
    args, kwargs = call.replaced((Q, K, V), mask=MASK, is_causal=False)
    assert sdpa(*args, **kwargs) == (Q, K, V, MASK, 0.0, False)
    call = signature(causal_by_default, qkv_kwarg_names=("query", "key", "value")).read(
        (0, Q), {"key": K, "value": V}
    )
    args, kwargs = call.replaced((Q, K, V), mask=MASK, is_causal=False)
    assert causal_by_default(*args, **kwargs) == (0, Q, K, V, MASK, False)


def test_names_work_for_a_forward_that_takes_anything():
    reader = signature(open_ended, qkv_kwarg_names=("a", "b", "c"), mask_kwarg_name="bias")
    call = reader.read((), {"a": Q, "b": K, "c": V, "is_causal": True})
    assert call.is_causal
    _, kwargs = call.replaced((V, Q, K), mask=MASK, is_causal=False)
    assert kwargs == {"a": V, "b": Q, "c": K, "bias": MASK, "is_causal": False}


def test_other_tensors_are_named():
    call = signature(open_ended).read((Q, K, V, torch.ones(3)), {"slopes": torch.ones(4)})
    assert sorted(call.other_tensors) == ["argument 3", "slopes"]
    assert signature(sdpa).read((Q, K, V, MASK), {}).other_tensors == {}


@pytest.mark.parametrize(
    ("forward", "options", "message"),
    [
        (
            sdpa,
            {"qkv_indices": (0, 1)},
            "qkv_indices=(0, 1) must be three different entries, for q, k and v of Core.forward(q, "
            "k, v, attn_mask, dropout_p, is_causal).",
        ),
        (
            sdpa,
            {"qkv_indices": (0, 1, 9)},
            "qkv_indices=(0, 1, 9) names 9, which Core.forward(q, k, v, attn_mask, dropout_p, "
            "is_causal) does not have.",
        ),
        (
            sdpa,
            {"qkv_kwarg_names": ("q", "key", "value")},
            "qkv_kwarg_names=('q', 'key', 'value') names 'key', 'value', which Core.forward(q, k, "
            "v, attn_mask, dropout_p, is_causal) does not have.",
        ),
        (
            sdpa,
            {"mask_kwarg_name": "bias"},
            "mask_kwarg_name='bias' is no parameter of Core.forward(q, k, v, attn_mask, dropout_p, "
            "is_causal). Name the parameter that takes the attention mask.",
        ),
        (
            lambda q, k, v, mask=None, attn_mask=None: None,
            {},
            "Core.forward has mask and attn_mask: set mask_kwarg_name to the one that takes the "
            "attention mask.",
        ),
    ],
)
def test_a_core_without_these_arguments_is_refused(
    forward: Callable[..., Any], options: dict[str, Any], message: str
):
    with pytest.raises(LayoutError) as caught:
        signature(forward, **options)
    assert str(caught.value) == message


def test_a_call_without_q_k_and_v_is_refused():
    with pytest.raises(LayoutError) as caught:
        signature(sdpa).read((Q, 3), {"is_causal": True})
    assert str(caught.value) == (
        "the call of Core has no tensor for k (qkv_indices says 1), v (qkv_indices says 2): it has "
        "positional arguments (Tensor, int) and keywords ['is_causal'], for forward(q, k, v, "
        "attn_mask, dropout_p, is_causal). Set qkv_indices to the places of q, k and v, or "
        "qkv_kwarg_names to their names."
    )
