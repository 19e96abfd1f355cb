"""Decides which experts a token is sent to, and keeps the experts evenly loaded.

::

    x -> gate -> scores ----------> gather -> normalise -> scale -> weights
                   | + bias            ^
                   '-> groups -> top-k '-> indices

Two means of balance, both of them independent of mesh and micro-batches:

*Bias.* A bias is added to the scores for the selection alone. Once a step it moves by ``speed``
towards the mean load, from the tokens each expert was sent in the whole global batch.

*Sequence-wise loss.* For each sequence, ``sum_i f_i P_i``: how often expert i was selected (1 is
even) times its mean share of the scores. Sequences weigh by their predicted tokens, as everything
in the loss does, so that its one normaliser serves here as well.

Only tokens with a valid label count: padding is no load.

Ref:
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    https://arxiv.org/abs/2412.19437
    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    https://arxiv.org/abs/2408.15664
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralign.loss import Predicted
from paralign.models.moe_sizes import MoeSizes

Decide = Callable[[Tensor, Tensor, Predicted], Tensor]
"""Selected experts ``[B, S, K]``, what they were selected by ``[B, S, E]``, and which tokens these
are -> the experts that the tokens are sent to, ``[B, S, K]``."""


class Routing(NamedTuple):
    """``indices`` (int64) and ``weights`` of the experts of every token, each ``[B, S, K]``."""

    indices: Tensor
    weights: Tensor


class Tally:
    """What a router has seen since it was last asked.

    Attributes:
        counts: Tokens sent to each expert ``[E]`` int64, or None: none were counted.
        taken: What :meth:`take_counts` has returned last: of the last optimizer step.
        loss: Sum of the balance loss, float64, or None.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.taken: Tensor | None = None
        self.loss: Tensor | None = None

    def add(self, counts: Tensor, loss: Tensor | None) -> None:
        """Add one micro-batch."""
        self.counts = counts if self.counts is None else self.counts + counts
        if loss is not None:
            loss = loss.detach().double()
            self.loss = loss if self.loss is None else self.loss + loss

    def take_counts(self) -> Tensor | None:
        """Return the counts and begin anew."""
        self.taken, self.counts = self.counts, None
        return self.taken

    def take_loss(self) -> Tensor | None:
        """Return the loss and begin anew."""
        loss, self.loss = self.loss, None
        return loss


class Router(nn.Module):
    """Scores every expert for every token and selects ``top_k``.

    Scores are computed in float32 at least, whatever the dtype of ``x``. Equal scores are taken in
    the order of the experts.

    Args:
        hidden_size: Width of a token.
        sizes: Which scores, how many experts, how they are balanced.
    """

    bias: Tensor | None

    def __init__(self, hidden_size: int, sizes: MoeSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate = nn.Linear(hidden_size, sizes.num_experts, bias=False)
        # A buffer: no gradient, no optimizer and no change of dtype may touch it.
        has_bias = sizes.bias_update_speed > 0
        self.register_buffer("bias", torch.zeros(sizes.num_experts) if has_bias else None)
        self.tally = Tally()
        # Sums over the ranks that hold other parts of the same sequences.
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _same
        # Has the last word on the choices of a training step: another run's may be replayed.
        self.decide: Decide = _as_selected

    def forward(self, x: Tensor, predicted: Predicted | None = None) -> Routing:
        """Route every token.

        Shapes (B rows, S tokens, D width, K of E experts):
            x: ``[B, S, D]``.
            predicted: ``valid`` is ``[B, S]``. None: nothing is counted, no balance loss is added.
            returns: indices and weights, ``[B, S, K]``, weights in float32 at least.

        Comm:
            none; with a balance loss over a split sequence, one all-reduce of ``B * (E + 1)``
            whole numbers over its ranks.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.gate.weight.to(dtype))
        scores = logits.sigmoid() if self.sizes.router_score == "sigmoid" else logits.softmax(-1)
        ranked = self._ranked(scores.detach())
        indices = self._select(ranked)
        if predicted is not None:
            indices = self.decide(indices, ranked, predicted)
        weights = self._weigh(scores.gather(-1, indices))
        if predicted is None:
            return Routing(indices, weights)
        loss = self._balance(scores, indices, predicted)
        # A recomputed forward is the same tokens once more.
        if self.training and not _inside_backward():
            chosen = indices[predicted.valid].flatten()
            self.tally.add(chosen.bincount(minlength=self.sizes.num_experts), loss)
        return Routing(indices, weights if loss is None else add_loss(weights, loss))

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Move the bias of every expert by ``speed`` towards an even load.

        Shapes:
            counts: ``[E]`` int64, tokens of the whole global batch.
        """
        assert self.bias is not None
        above = counts * self.sizes.num_experts - counts.sum()  # in whole numbers: exact
        self.bias.sub_(self.sizes.bias_update_speed * above.sign().to(self.bias.dtype))

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return what experts are selected by."""
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)

    def _select(self, scores: Tensor) -> Tensor:
        if self.sizes.num_limited_groups < self.sizes.num_expert_groups:
            scores = self._limit(scores)
        return top_k(scores, self.sizes.top_k)

    def _limit(self, scores: Tensor) -> Tensor:
        """Leave out the experts of all but the best groups: those with the best two experts."""
        groups = torch.unflatten(scores, -1, (self.sizes.num_expert_groups, -1))
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, top_k(best, self.sizes.num_limited_groups), True)
        return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)

    def _weigh(self, selected: Tensor) -> Tensor:
        if self.sizes.router_normalise == "sum":
            # Sigmoid scores may all underflow; then all weights are zero, not NaN.
            total = selected.sum(-1, keepdim=True)
            selected = selected / total.clamp(min=torch.finfo(selected.dtype).tiny)
        elif self.sizes.router_normalise == "softmax":
            selected = selected.softmax(-1)
        return selected * self.sizes.router_scaling

    def _balance(self, scores: Tensor, indices: Tensor, predicted: Predicted) -> Tensor | None:
        """Return this rank's part of the balance loss, already divided by the normaliser.

        ``T`` predicted tokens of a sequence, ``N`` of all: the sequence's loss ``sum_i f_i P_i``
        weighs ``T / N``, and its mean shares are sums divided by ``T``, which cancels.
        """
        sizes = self.sizes
        if sizes.balance_loss == 0:
            return None
        valid = predicted.valid
        counts = indices.new_zeros(indices.shape[0], sizes.num_experts + 1)
        counts.scatter_add_(1, indices.flatten(1), valid.repeat_interleave(sizes.top_k, 1).long())
        counts[:, -1] = valid.sum(1)
        counts = self.sum_over_sequence(counts).to(scores.dtype)
        even = counts[:, -1:].clamp(min=1) * sizes.top_k / sizes.num_experts
        load = counts[:, :-1] / even
        if sizes.router_score == "sigmoid":
            total = scores.sum(-1, keepdim=True)
            scores = scores / total.clamp(min=torch.finfo(scores.dtype).tiny)
        by_token = (scores * load.unsqueeze(1)).sum(-1)
        loss: Tensor = (by_token * valid).sum() * (sizes.balance_loss / predicted.num_tokens)
        return loss


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` largest of the last dim, equal ones in their order.

    ``torch.topk`` takes equal values in any order, and may take others on another device.
    """
    if scores.is_meta:
        return scores.topk(k, dim=-1).indices
    beyond = min(k + 1, scores.shape[-1])
    values, indices = scores.topk(beyond, dim=-1)
    if bool((values[..., 1:] == values[..., :-1]).any()):
        indices = scores.sort(dim=-1, descending=True, stable=True).indices
    return indices[..., :k].contiguous()


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``; whatever is minimised through it, ``loss`` is minimised as well.

    The gradient of ``loss`` is 1, so it must be scaled as the step's loss is. It travels with
    ``x``, through every pipeline schedule, where a loss of its own could not.
    """
    result: Tensor = _AddLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return result


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.clone()  # no view: a split backward pass cannot start at one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grads[0], torch.ones((), dtype=dtype, device=device)


def named_routers(modules: Iterable[nn.Module]) -> dict[str, Router]:
    """Return the routers in ``modules``, such as the stages of a rank, by global name."""
    return {
        name: module
        for root in modules
        for name, module in root.named_modules()
        if isinstance(module, Router)
    }


def named_biases(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the router biases in ``modules`` by global name."""
    return {
        f"{name}.bias": router.bias
        for name, router in named_routers(modules).items()
        if router.bias is not None
    }


def update_biases(
    routers: Iterable[Router], *, sum_over_tokens: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Update the bias of every router from all it has counted since the last update.

    Comm:
        What ``sum_over_tokens`` does, once for all routers.

    Args:
        routers: Routers, in the same order on every rank. Those without a bias forget what they
            have counted.
        sum_over_tokens: Sums whole numbers over all ranks with other tokens; None: there are none.
    """
    waiting, found = [], []
    for router in routers:
        counts = router.tally.take_counts()
        if router.bias is not None:
            empty = torch.zeros(len(router.bias), dtype=torch.int64, device=router.bias.device)
            waiting.append(router)
            found.append(empty if counts is None else counts)
    if not waiting:
        return
    flat = torch.cat(found)
    flat = flat if sum_over_tokens is None else sum_over_tokens(flat)
    for router, counts in zip(waiting, flat.split([len(c) for c in found]), strict=True):
        router.update_bias(counts)


def take_balance_loss(routers: Iterable[Router]) -> Tensor | None:
    """Return the sum of what the routers have added to the loss, float64; None if nothing."""
    losses = [loss for router in routers if (loss := router.tally.take_loss()) is not None]
    return torch.stack(losses).sum() if losses else None


def _same(x: Tensor) -> Tensor:
    return x


def _as_selected(indices: Tensor, ranked: Tensor, predicted: Predicted) -> Tensor:
    return indices


def _inside_backward() -> bool:
    # The one thing that tells a recomputation from a forward; no public name for it.
    return bool(torch._C._current_graph_task_id() != -1)
