"""Checks of a call before any collective: sizes against the axis, and what each rank was fed.

Everything here decides from the call's shapes, which are equal on every rank, or from a gathered
fingerprint, so that all ranks of the axis refuse together and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paralign.errors import LayoutError
from paralign.parallel.context_call import QKV, CoreCall
from paralign.parallel.context_masks import mask_problems
from paralign.parallel.context_rules import NUM_DIMS, head_problems


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a call is checked against."""

    seq_dim: int
    head_dim: int
    degree: int  # ranks of the axis
    inner: int  # ranks that heads are split over
    num_chunks: int  # chunks of the sequence over the axis
    seq_len: int | None  # global, where it is known
    axis: str

    @property
    def axis_text(self) -> str:
        """The axis as messages show it."""
        return f"axis {self.axis!r} ({self.degree} ranks)"


def check_call(
    call: CoreCall, qkv: Sequence[Tensor], *, sizes: Sizes, global_heads: int, module: nn.Module
) -> None:
    """Refuse a call whose sizes, mask or arguments would give another result than one device.

    Args:
        call: The call as it was made.
        qkv: This rank's plain q, k and v.
        sizes: The axis and the dims.
        global_heads: Query heads over all tensor-parallel ranks.
        module: The core.

    Raises:
        LayoutError: All problems, listed.
    """
    problems = _dim_problems(qkv, sizes)
    if not problems:
        problems += _sequence_problems(qkv, sizes)
        problems += _head_count_problems(qkv, sizes)
        if call.mask is not None:
            q = qkv[0]
            (batch_dim,) = {0, 1, 2} - {sizes.seq_dim, sizes.head_dim}
            local_len = q.shape[sizes.seq_dim]
            problems += mask_problems(
                call.mask,
                batch=q.shape[batch_dim],
                head_counts=sorted({q.shape[sizes.head_dim], global_heads}),
                seq_len=sizes.seq_len or local_len * sizes.degree,
                local_len=local_len,
                axis=sizes.axis_text,
            )
    problems += _argument_problems(call, module)
    if problems:
        core = call.signature.core
        title = f"context parallel over {sizes.axis_text} refuses this call of {core}"
        raise LayoutError.from_problems(title, problems)


def _dim_problems(qkv: Sequence[Tensor], sizes: Sizes) -> list[str]:
    problems = [
        f"{name} has shape {list(x.shape)}: {x.ndim} dims, but the layouts have {NUM_DIMS} (packed "
        "THD is not supported). Unflatten rows or heads first"
        for name, x in zip(QKV, qkv, strict=True)
        if x.ndim != NUM_DIMS
    ]
    kinds = {(x.dtype, x.device) for x in qkv}
    if len(kinds) > 1:
        found = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in zip(QKV, qkv, strict=True))
        problems.append(f"q, k and v need one dtype and device, not {found}")
    return problems


def _sequence_problems(qkv: Sequence[Tensor], sizes: Sizes) -> list[str]:
    dim, problems = sizes.seq_dim, []
    local_len = qkv[0].shape[dim]
    global_len = local_len * sizes.degree
    for name, x in list(zip(QKV, qkv, strict=True))[1:]:
        if x.shape[dim] != local_len:
            problems.append(
                f"{name} holds {x.shape[dim]} tokens (dim {dim} of {list(x.shape)}) and q holds "
                f"{local_len} (of {list(qkv[0].shape)}). Only self-attention is supported: "
                "q, k and v must be slices of the same tokens"
            )
    if sizes.seq_len is not None and global_len != sizes.seq_len:
        whole = local_len == sizes.seq_len
        problems.append(
            f"q holds {local_len} tokens (seq_dim={dim} of {list(qkv[0].shape)}) on each rank of "
            f"{sizes.axis_text}, {global_len} together, but seq_len={sizes.seq_len}. "
            + ("This is the whole sequence on every rank. " if whole else "")
            + f"Feed each rank its slice of {sizes.seq_len // sizes.degree} tokens (program.shard "
            "does), or check that seq_dim counts tokens"
        )
    chunks_per_rank = sizes.num_chunks // sizes.degree
    if local_len % chunks_per_rank:
        problems.append(
            f"q holds {local_len} tokens (seq_dim={dim} of {list(qkv[0].shape)}), which "
            f"load_balance=True must cut into {chunks_per_rank} equal chunks. Use a global length "
            f"that is a multiple of 2 * {sizes.degree}"
        )
    return problems


def _head_count_problems(qkv: Sequence[Tensor], sizes: Sizes) -> list[str]:
    num_heads, num_kv_heads, num_v_heads = (x.shape[sizes.head_dim] for x in qkv)
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip(QKV, qkv, strict=True))
    if num_kv_heads != num_v_heads:
        return [
            f"k has {num_kv_heads} heads and v has {num_v_heads} (head_dim={sizes.head_dim} of "
            f"{shapes}); each key head needs its value head. Check that head_dim counts heads"
        ]
    found = head_problems(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        degree=sizes.degree,
        inner=sizes.inner,
        axis=sizes.axis,
    )
    return [f"{problem} (head_dim={sizes.head_dim} of {shapes})" for problem in found]


def _argument_problems(call: CoreCall, module: nn.Module) -> list[str]:
    problems = [
        f"argument {name!r} is a tensor of shape {list(tensor.shape)} that is neither q, k, v nor "
        "the mask: which heads and tokens of it belong to a rank is not known. Apply it before the "
        "core, or name it with mask_kwarg_name if it is the mask"
        for name, tensor in call.other_tensors.items()
    ]
    drops = [f"{name}={value}" for name, value in call.dropout.items() if module.training]
    drops += [
        f"{name}.p={drop.p}"
        for name, drop in module.named_modules()
        if isinstance(drop, nn.Dropout) and drop.training and drop.p
    ]
    problems += [
        f"{drop} inside the core draws a mask per rank, not the one of a single device. Use 0 "
        "here, and drop outside attention"
        for drop in drops
    ]
    return problems


class SequenceProof:
    """Makes sure once, from the data, that the ranks of an axis were not fed the same tokens.

    Comm:
        One all-gather of two integers per rank, at the first call whose data can tell. None once it
        could tell, and none ever if positions are proven by whoever split the batch.
    """

    def __init__(self, *, seq_dim: int, axis: str, group: dist.ProcessGroup) -> None:
        self.seq_dim = seq_dim
        self.axis = axis
        self.group = group
        self.done = dist.get_world_size(group) == 1

    def check(self, qkv: Sequence[Tensor]) -> None:
        """Compare this call's q, k and v over the ranks, unless an earlier call did.

        Raises:
            LayoutError: Two ranks hold the same values, and not only because all tokens are alike.
        """
        # Shape inference runs on tensors without data: it must not count as the first real call.
        if self.done or any(x.is_meta or isinstance(x, FakeTensor) for x in qkv):
            return
        telling = any(_varies(x, self.seq_dim) for x in qkv)
        mine = torch.stack([fingerprint(qkv), torch.tensor(int(telling), device=qkv[0].device)])
        degree = dist.get_world_size(self.group)
        gathered = mine.new_empty(degree * 2)
        dist.all_gather_single(gathered, mine, group=self.group)
        prints = [(int(value), bool(can_tell)) for value, can_tell in gathered.view(degree, 2)]
        # Decided from what every rank has: all go on, all ask again next time, or all refuse.
        self.done = any(can_tell for _, can_tell in prints)
        same: dict[int, list[int]] = {}
        for rank, (value, can_tell) in enumerate(prints):
            if can_tell:
                same.setdefault(value, []).append(rank)
        for ranks in same.values():
            if len(ranks) > 1:
                self._refuse(ranks, degree, qkv[0])

    def _refuse(self, ranks: list[int], degree: int, q: Tensor) -> None:
        everyone = len(ranks) == degree
        who = "every rank" if everyone else f"ranks {', '.join(map(str, ranks))}"
        were = "was" if everyone else "were"
        what = (
            "the whole sequence was given to each of them" if everyone else "a slice was repeated"
        )
        length = q.shape[self.seq_dim]
        share = length // degree if everyone else length
        raise LayoutError(
            f"{who} of axis {self.axis!r} ({degree} ranks) {were} fed the same q, k and v of shape "
            f"{list(q.shape)}: most likely {what}. Attention would take them for one sequence of "
            f"{length * degree} tokens. Feed each rank its slice: x.narrow(seq_dim, rank * "
            f"{share}, {share}) with its labels and positions, or program.shard(batch)."
        )


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Hash the values of some tensors into one int64 that does not depend on summation order."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for salt, x in enumerate(tensors, start=1):
        bits = x.detach().contiguous().view(-1).view(_WORDS[x.element_size()])
        for offset in range(0, bits.numel(), _BLOCK):  # bounded memory
            block = bits[offset : offset + _BLOCK].to(torch.int64)
            place = torch.arange(offset, offset + block.numel(), device=x.device)
            # Integers wrap around, so the sum is the same in any order; odd factors lose no bits.
            total += (block * ((place * 0x9E3779B1 + salt) * 2 + 1)).sum()
    return total


def _varies(x: Tensor, seq_dim: int) -> bool:
    """Say whether not all tokens of ``x`` are alike: constant inputs prove nothing."""
    return bool((x.detach() != x.detach().narrow(seq_dim, 0, 1)).any())


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20
