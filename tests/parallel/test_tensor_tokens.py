"""A module that sees each token on one rank of tp: what comes out, its gradients, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from paralign.collectives import split_dim
from paralign.errors import LayoutError
from paralign.parallel.tensor import tensor_problems
from paralign.parallel.tensor_base import TensorParallel
from paralign.parallel.tensor_styles import ColumnParallel, TokenWise
from paralign.parallel.tensor_tokens import OwnTokens
from paralign.testing import run_on_ranks
from tests.parallel.test_tensor import pieces

EPS = torch.finfo(torch.float64).eps


class Weighted(nn.Module):
    """A linear layer whose result is weighted token by token; counts the tokens that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.num_seen = 0

    def forward(self, x: Tensor, weight: Tensor | None = None, power: int = 1) -> Tensor:
        self.num_seen = x.shape[0] * x.shape[1]
        out: Tensor = self.scale(x)
        return out if weight is None else out * weight.unsqueeze(-1) ** power


def made() -> tuple[Weighted, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Weighted().double()
    x, grad = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    return model, x, torch.rand(2, 8, dtype=torch.float64), grad


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((ours - theirs).norm() / theirs.norm())


def _own_tokens(sequence_parallel: bool) -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    model, x, weight, grad = made()
    x.requires_grad_()
    whole = model(x, weight, power=2)
    whole.backward(grad)
    expected = [x.grad, model.scale.weight.grad, model.scale.bias.grad]
    # Inside, a rank's tokens are its own in both modes.
    outer = TensorParallel(sequence_parallel=sequence_parallel)
    TokenWise().configured(TensorParallel(), enters=True).apply(model.scale, mesh)
    model.zero_grad()
    OwnTokens().configured(outer, enters=True).apply(model, mesh)

    def cut(tensor: Tensor) -> Tensor:
        return split_dim(tensor, dim=1, group=mesh.get_group()) if sequence_parallel else tensor

    mine = cut(x.detach()).requires_grad_()
    out = model(mine, weight, power=2)
    assert model.num_seen == 16 // n
    assert torch.equal(out, cut(whole.detach()))
    out.backward(cut(grad))
    assert expected[0] is not None and mine.grad is not None
    assert distance(mine.grad, cut(expected[0])) <= 10 * EPS
    for parameter, right in zip((model.scale.weight, model.scale.bias), expected[1:], strict=True):
        assert isinstance(parameter.grad, DTensor)
        total = parameter.grad.to_local().clone()
        assert right is not None and distance(total, right) > 0.01
        dist.all_reduce(total)
        assert distance(total, right) <= 10 * EPS


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_each_token_is_computed_once_and_gradients_of_weights_are_partial_sums(sequence_parallel):
    run_on_ranks(_own_tokens, 2, sequence_parallel)


def _refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    messages = []
    whole = TensorParallel(sequence_parallel=False)
    for seq_len, num_weights in ((7, 7), (8, 4)):
        model, x, weight, _ = made()
        OwnTokens().configured(whole, enters=True).apply(model, mesh)
        with pytest.raises(LayoutError) as caught:
            model(x[:, :seq_len], weight[:, :num_weights])
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_tokens_that_do_not_divide_and_tensors_that_are_not_of_tokens_are_refused():
    for uneven, foreign in run_on_ranks(_refused, 2):
        assert "dim=1 of shape [2, 7, 6] does not split evenly over 2 ranks" in uneven
        assert (
            "Weighted has style OwnTokens and was given a tensor of shape [2, 4], which has not "
            "one value for each of the 8 tokens on dim=1" in foreign
        )


def problems(plan: Any, model: nn.Module, experts: list[str]) -> list[str]:
    return tensor_problems(model, plan, degree=2, options=TensorParallel(), experts=experts)


def test_experts_must_see_own_tokens_and_belong_to_no_other_style():
    moe = {"num_experts": 4, "expert_hidden_size": 8, "num_layers": 1}
    model, plan = pieces("llama", **moe)
    stack = "layers.0.ffn.experts"
    assert problems(plan, model, [stack]) == []
    without = {k: v for k, v in plan.items() if k != "layers.*.ffn"}
    assert problems(without, model, [stack]) == [
        f"{stack} holds experts and is inside no module with style OwnTokens, so that ranks of tp "
        "would compute the same tokens. Give it to the module that calls router and experts"
    ]
    twice = problems({**plan, stack: TokenWise()}, model, [stack])
    assert twice[0] == (
        f"{stack}.gate is one of the blueprint's experts() and is covered by {stack} as well. "
        "Keep one"
    )
    sends = {k: v for k, v in plan.items() if k != "layers.*.ffn.router"}
    sends["layers.*.ffn.router.gate"] = ColumnParallel()
    assert problems(sends, model, [stack]) == [
        "layers.0.ffn.router.gate has style ColumnParallel, which sends the stream, inside a "
        "module with style OwnTokens, where a rank has its own tokens alone. Use TokenWise()"
    ]
