"""The attention core: the one part of a layer in which tokens meet.

It is a module of its own so that context parallel can attach to it; everything around it treats
each token alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralign.errors import LayoutError


class CausalAttention(nn.Module):
    """Scaled dot-product attention over heads that are already split.

    Grouped-query: each key and value head serves ``N / N_kv`` neighbouring query heads.

    Args:
        scale: Factor of the scores; None: ``1 / sqrt(D)``.
    """

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Let every query attend to the keys it may see.

        Shapes (B rows, N heads, N_kv key/value heads, S queries, S_k keys, D and D_v head widths):
            q: ``[B, N, S, D]``.
            k: ``[B, N_kv, S_k, D]``.
            v: ``[B, N_kv, S_k, D_v]``.
            mask: broadcasts to ``[B, N, S, S_k]``; boolean (True: attend) or added to the scores.
            returns: ``[B, N, S, D_v]``.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: Which keys a query sees; with ``is_causal`` it narrows the causal triangle
                further.
            is_causal: Hide the keys after a query. Queries and keys must then be the same tokens.

        Raises:
            LayoutError: Heads do not divide, or ``is_causal`` with another number of keys than
                queries.
        """
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        if num_heads % num_kv_heads or v.shape[1] != num_kv_heads:
            raise LayoutError(
                f"{num_heads} query heads, {num_kv_heads} key heads and {v.shape[1]} value heads: "
                "keys and values need equally many heads, and a divisor of the query heads. Shapes "
                f"(BNSD): q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
            )
        num_queries, num_keys = q.shape[2], k.shape[2]
        if is_causal and num_queries != num_keys:
            raise LayoutError(
                f"is_causal=True needs the same tokens on both sides, but there are {num_queries} "
                f"queries and {num_keys} keys. Pass is_causal=False and a mask of shape "
                f"[{num_queries}, {num_keys}]."
            )
        if is_causal and mask is not None:
            mask, is_causal = _with_causal(mask, num_queries), False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=num_kv_heads != num_heads,
        )


def _with_causal(mask: Tensor, seq_len: int) -> Tensor:
    triangle = torch.ones(seq_len, seq_len, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return mask & triangle
    return mask.masked_fill(~triangle, float("-inf"))
