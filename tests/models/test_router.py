"""Routing: scores, selection, weights, the two means of balance, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paralign.loss import Predicted
from paralign.models.moe_sizes import MoeSizes
from paralign.models.router import (
    Router,
    add_loss,
    named_biases,
    named_routers,
    take_balance_loss,
    top_k,
    update_biases,
)
from tests.models.helpers import fill_everything

B, S, D, E, K = 3, 6, 5, 8, 3
SIZES = MoeSizes(num_experts=E, top_k=K, expert_hidden_size=4)
SIGMOID = replace(SIZES, router_score="sigmoid")


def made(sizes: MoeSizes = SIZES) -> tuple[Router, Tensor]:
    router = Router(D, sizes).double()
    fill_everything(router)
    x = torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return router, x


def tokens(padding: int = 0) -> Predicted:
    """Return all tokens but the last ``padding`` of the first row."""
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[0, S - padding :] = False
    return Predicted(valid, int(valid.sum()))


def same(found: Tensor | None, expected: Any) -> bool:
    return found is not None and expected is not None and torch.equal(found, expected)


def kept_in(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a sum over ranks that keeps what it is given, and adds nothing."""

    def keep(counts: Tensor) -> Tensor:
        seen.append(counts.clone())
        return counts

    return keep


def scores_of(router: Router, x: Tensor) -> Tensor:
    logits = x @ router.gate.weight.t()
    if router.sizes.router_score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", ["none", "sum", "softmax"])
def test_weights_are_the_normalised_scores_of_the_best_experts(score, normalise):
    if (score, normalise) == ("softmax", "softmax"):
        pytest.skip("refused")
    sizes = replace(SIZES, router_score=score, router_normalise=normalise, router_scaling=2.5)
    router, x = made(sizes)
    indices, weights = router(x)
    best, order = scores_of(router, x).sort(-1, descending=True)
    best = best[..., :K]
    if normalise == "sum":
        best = best / best.sum(-1, keepdim=True)
    elif normalise == "softmax":
        best = torch.exp(best) / torch.exp(best).sum(-1, keepdim=True)
    assert torch.equal(indices, order[..., :K])
    torch.testing.assert_close(weights, 2.5 * best, rtol=1e-13, atol=1e-15)


def test_equal_scores_are_taken_in_order():
    assert top_k(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]
    assert top_k(torch.zeros(40), 5).tolist() == [0, 1, 2, 3, 4]
    assert top_k(torch.tensor([1.0, 5.0, 2.0]), 3).tolist() == [1, 2, 0]


def test_scores_that_all_vanish_give_weights_of_zero():
    router, x = made(SIGMOID)
    router.gate.weight.data.fill_(-1e6)
    _, weights = router(x.abs())
    assert torch.equal(weights, torch.zeros_like(weights))


def test_a_bias_changes_the_selection_and_not_the_weights():
    router, x = made(replace(SIGMOID, bias_update_speed=0.1, router_normalise="none"))
    assert router.bias is not None
    plain = scores_of(router, x)
    router.bias[5] = 10.0
    indices, weights = router(x)
    assert bool((indices[..., 0] == 5).all())
    torch.testing.assert_close(weights, plain.gather(-1, indices), rtol=1e-13, atol=1e-15)


def test_a_token_stays_inside_its_best_groups():
    sizes = replace(SIZES, top_k=2, num_expert_groups=4, num_limited_groups=1)
    router, x = made(sizes)
    indices, _ = router(x)
    pairs = scores_of(router, x).unflatten(-1, (4, 2)).sum(-1)
    assert torch.equal(indices[..., 0] // 2, pairs.argmax(-1))
    assert torch.equal(indices[..., 0] // 2, indices[..., 1] // 2)


def test_groups_of_three_are_judged_by_their_best_two():
    router = Router(2, MoeSizes(num_experts=6, top_k=1, num_expert_groups=2, expert_hidden_size=1))
    limited = router._limit(torch.tensor([[6.0, 0, 0, 5, 5, -9]]))
    assert limited.isinf().tolist() == [[True, True, True, False, False, False]]


def test_the_bias_moves_towards_the_mean_load():
    router, _ = made(replace(SIZES, bias_update_speed=0.25))
    router.update_bias(torch.tensor([4, 0, 2, 2, 2, 2, 2, 2]))
    assert router.bias is not None
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    router.update_bias(torch.zeros(E, dtype=torch.int64))
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]


def test_padding_is_not_counted_and_batches_add_up():
    router, x = made(replace(SIZES, bias_update_speed=0.25))
    indices, _ = router(x, tokens(padding=2))
    expected = torch.cat([indices[0, :-2].flatten(), indices[1:].flatten()]).bincount(minlength=E)
    assert same(router.tally.counts, expected)
    router(x, tokens(padding=2))
    assert same(router.tally.take_counts(), 2 * expected)
    assert router.tally.counts is None


def test_nothing_is_counted_outside_a_step_or_without_training():
    router, x = made(replace(SIZES, balance_loss=0.1))
    router(x)
    router.eval()
    router(x, tokens())
    assert router.tally.counts is None and router.tally.loss is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_is_not_counted_again(use_reentrant):
    router, x = made(replace(SIZES, balance_loss=0.1))
    router(x, tokens())
    counts, loss = router.tally.take_counts(), router.tally.take_loss()
    x.requires_grad_()
    _, weights = checkpoint(router, x, tokens(), use_reentrant=use_reentrant)
    weights.square().sum().backward()
    assert same(router.tally.counts, counts)
    assert same(router.tally.loss, loss)


@pytest.mark.parametrize("sizes", [SIZES, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("padding", [0, 4, S])
def test_the_balance_loss_is_the_mean_over_sequences_by_tokens(sizes, padding):
    router, x = made(replace(sizes, balance_loss=0.5))
    predicted = tokens(padding)
    indices, weights = router(x, predicted)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(B):
        valid = predicted.valid[row]
        if not valid.any():
            continue
        scores = scores_of(router, x[row, valid])
        shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
        chosen = indices[row, valid].flatten().bincount(minlength=E)
        frequency = chosen.double() * E / (K * valid.sum())
        expected = (
            expected
            + 0.5 * valid.sum().double() / predicted.num_tokens * (frequency * shares).sum()
        )
    torch.testing.assert_close(router.tally.loss, expected.detach(), rtol=1e-13, atol=0)
    # What flows back through the weights is the gradient of this loss and nothing else.
    (wanted,) = torch.autograd.grad(expected, router.gate.weight)
    (weights * 0).sum().backward()
    torch.testing.assert_close(router.gate.weight.grad, wanted, rtol=1e-12, atol=1e-16)


def test_an_even_load_has_the_loss_of_its_coefficient():
    router, x = made(replace(SIZES, balance_loss=0.5, top_k=E))
    router(x, tokens())
    torch.testing.assert_close(router.tally.loss, torch.tensor(0.5, dtype=torch.float64))


def test_slices_of_sequences_add_up_to_the_whole_when_counts_are_summed():
    router, x = made(replace(SIZES, balance_loss=0.5))
    predicted = tokens(padding=2)
    router(x, predicted)
    loss = router.tally.take_loss()
    seen: list[Tensor] = []
    router.sum_over_sequence = kept_in(seen)
    halves = [slice(0, S // 2), slice(S // 2, S)]
    for half in halves:
        router(x[:, half], predicted._replace(valid=predicted.valid[:, half]))
    router.tally.take_loss()
    router.sum_over_sequence = lambda counts: seen[0] + seen[1]
    for half in halves:
        router(x[:, half], predicted._replace(valid=predicted.valid[:, half]))
    torch.testing.assert_close(router.tally.loss, loss, rtol=1e-13, atol=0)


def test_an_added_loss_changes_no_value_and_has_the_gradient_one():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = torch.tensor(5.0, requires_grad=True)
    out = add_loss(x, y.square())
    assert torch.equal(out, x) and not out._is_view()
    (out * 7).sum().backward()
    assert same(x.grad, torch.tensor([7.0, 7.0])) and same(y.grad, torch.tensor(10.0))


def test_low_precision_is_scored_in_float32():
    router, x = made(replace(SIGMOID, bias_update_speed=0.1, balance_loss=0.1))
    assert router.bias is not None and router.bias.dtype == torch.float64
    low = Router(D, router.sizes)
    low.load_state_dict(router.state_dict())
    low.gate.weight.data = low.gate.weight.data.bfloat16()
    _, weights = low(x.bfloat16(), tokens())
    assert weights.dtype == torch.float32
    assert {bias.dtype for bias in named_biases([low]).values()} == {torch.float32}


def test_biases_are_updated_from_summed_counts_in_one_go():
    first, x = made(replace(SIZES, bias_update_speed=0.25))
    second, _ = made(replace(SIZES, bias_update_speed=0.25))
    third, _ = made()  # without a bias
    routers = torch.nn.ModuleDict({"a": first, "b": second, "c": third})
    for router in (first, third):
        router(x, tokens())
    seen: list[Tensor] = []
    names = named_routers([routers])
    assert list(names) == ["a", "b", "c"] and list(named_biases([routers])) == ["a.bias", "b.bias"]
    assert first.tally.counts is not None
    counts = first.tally.counts.clone()
    update_biases(names.values(), sum_over_tokens=kept_in(seen))
    (flat,) = seen
    assert torch.equal(flat, torch.cat([counts, torch.zeros(E, dtype=torch.int64)]))
    assert same(first.bias, -0.25 * (counts * E - counts.sum()).sign())
    assert same(second.bias, torch.zeros(E, dtype=torch.float64))
    assert third.tally.counts is None


def test_balance_losses_of_all_routers_are_taken_once():
    first, x = made(replace(SIZES, balance_loss=0.5))
    second, _ = made(replace(SIZES, balance_loss=0.5))
    assert take_balance_loss([first, second]) is None
    for router in (first, second):
        router(x, tokens())
    losses = [router.tally.loss for router in (first, second)]
    expected = sum(loss for loss in losses if loss is not None)
    assert same(take_balance_loss([first, second]), expected)
    assert take_balance_loss([first, second]) is None
