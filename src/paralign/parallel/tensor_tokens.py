"""The style of a layer with experts: each token is routed and computed on one rank of tp only.

::

    stream [B, S/n, H]   the rank's own tokens as they are                              [B, S/n, H]
    stream [B, S, H]     split -> the rank's own tokens [B, S/n, H] -> joined           [B, S, H]
        (first line: with sequence parallel; second: without)

Inside, a rank of tp is one more rank with tokens of its own, as those of dp_shard and cp are.
Weights that every rank holds, of router and shared expert, get partial sums as gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paralign.collectives import join_dim, split_dim
from paralign.errors import LayoutError
from paralign.parallel.tensor_base import Region, Returned, TensorStyle
from paralign.parallel.tensor_weights import Spread


class OwnTokens(TensorStyle):
    """A module that must see each token of the stream on one rank only, such as a layer of experts.

    Its first argument is the stream; every other tensor among its arguments has one value a token
    of the whole sequence, ``[B, S, ...]``, and is cut alike. It returns the stream. What is inside
    has styles of its own, :class:`TokenWise` say, and works as with sequence parallel.

    Comm:
        with sequence parallel none; without, one all-gather of the stream forward, and one of its
        gradient backward.
    """

    @property
    def crossing(self) -> str:
        """Without sequence parallel, tokens are split and joined."""
        return "" if self.options.sequence_parallel else "split"

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """None: what is inside has styles of its own."""
        return {}

    def returned(self, module: nn.Module, degree: int) -> Returned:
        """Its part of the stream."""
        return self.stream

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Run on this rank's tokens."""
        name, dim = type(module).__name__, self.seq_dim
        is_cut = self.options.sequence_parallel

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            own = x if is_cut else split_dim(x, dim=dim, group=region.group)
            num_own = own.shape[dim]

            def cut(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                if leaf.ndim <= dim or leaf.shape[dim] != num_own * region.degree:
                    raise LayoutError(
                        f"{name} has style OwnTokens and was given a tensor of shape "
                        f"{list(leaf.shape)}, which has not one value for each of the "
                        f"{num_own * region.degree} tokens on dim={dim}. Give such tensors to "
                        "another module, or keep them as attributes."
                    )
                return leaf.narrow(dim, region.rank * num_own, num_own)

            out = call(own, *tree_map(cut, args), **tree_map(cut, kwargs))
            return out if is_cut else join_dim(out, dim=dim, group=region.group)

        return forward
