"""Global attention masks, and the part of them that one rank's heads and queries need.

A mask is given whole to every rank: boolean (True: may attend) or additive, ``[S, S]`` or
``[B or 1, N or 1, S or 1, S]`` whatever the layout of q, k and v. It is checked against the global
sequence, then sliced; it is never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paralign.errors import LayoutError

MASK_SHAPES = "[S, S] or [B or 1, N or 1, S or 1, S]"


def mask_problems(
    mask: object, *, batch: int, head_counts: Sequence[int], seq_len: int, local_len: int, axis: str
) -> list[str]:
    """List what is wrong with a mask for a global sequence of ``seq_len`` tokens.

    Args:
        mask: What the call passed as the mask, not None.
        batch: Rows of q.
        head_counts: Numbers of heads the mask may have: those of this rank's q before the sequence
            is exchanged, and the global number if heads are also split over another axis.
        seq_len: Global sequence length.
        local_len: Tokens that each rank was fed.
        axis: The axis with its size, as messages show it.
    """
    if not isinstance(mask, Tensor):
        return [f"mask is a {type(mask).__name__}, not a tensor; pass a tensor {MASK_SHAPES}"]
    problems = []
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        problems.append(
            f"mask has dtype {mask.dtype}; pass bool (True: may attend) or floating point"
        )
    allowed: list[set[int]] = [{seq_len}, {seq_len}]
    if mask.ndim == 4:
        allowed = [{1, batch}, {1, *head_counts}, {1, seq_len}, {seq_len}]
    if mask.ndim not in (2, 4) or any(
        size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)
    ):
        hint = ""
        if mask.shape[-1:] == (local_len,) and local_len != seq_len:
            hint = (
                f" The mask fits {local_len} tokens, what each rank was fed: either every rank was "
                "fed the whole sequence and must be fed its slice, or the mask was sliced and must "
                "be passed whole."
            )
        problems.append(
            f"mask has shape {list(mask.shape)}, but must be {MASK_SHAPES} with S={seq_len} "
            f"({local_len} tokens on each rank of {axis}), B={batch} and "
            f"N={' or '.join(map(str, head_counts))}.{hint}"
        )
    return problems


def select_heads(mask: Tensor, *, first: int, count: int) -> Tensor:
    """Return the mask of ``count`` heads from ``first`` on; one without heads stays whole."""
    if mask.ndim < 4 or mask.shape[1] == 1:
        return mask
    return mask.narrow(1, first, count)


def select_rows(mask: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rows of the queries in ``runs`` of global positions, concatenated."""
    if mask.shape[-2] == 1:
        return mask
    pieces = [mask.narrow(-2, start, stop - start) for start, stop in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)


def causal_rows(start: int, stop: int, *, device: torch.device) -> Tensor:
    """Return which of the keys ``0 .. stop`` the queries ``start .. stop`` may see.

    Shapes:
        returns: boolean ``[stop - start, stop]``, True: may attend.
    """
    queries = torch.arange(start, stop, device=device)
    return torch.arange(stop, device=device) <= queries[:, None]


def check_mask_is_causal(mask: Tensor, *, core: str) -> None:
    """Refuse a mask beside ``is_causal=True`` unless the mask itself hides every later key.

    Cores disagree on the pair: some intersect both, some let the mask win, torch's
    ``scaled_dot_product_attention`` raises. With a mask that is causal by itself they all mean the
    same.

    Raises:
        LayoutError: The mask shows a key after its query.
    """
    if mask.is_meta:
        return
    seq_len = mask.shape[-1]
    visible = mask if mask.dtype == torch.bool else mask != float("-inf")
    later = torch.ones(seq_len, seq_len, dtype=torch.bool, device=mask.device).triu(1)
    if bool((visible & later).any()):
        raise LayoutError(
            f"{core} was called with is_causal=True and a mask of shape {list(mask.shape)} that "
            "shows keys after their query. Where keys and values are gathered, queries are a "
            "slice, and cores disagree on what both together mean. Put the causal rule into the "
            "mask, mask & torch.ones(S, S, dtype=torch.bool).tril(), and pass is_causal=False."
        )
