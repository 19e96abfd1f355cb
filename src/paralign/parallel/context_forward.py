"""The forward that stands in front of an attention core: exchange, attend, exchange back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.all_to_all import all_to_all_dims, fused_all_to_all_dims
from paralign.collectives import all_gather_stack
from paralign.errors import LayoutError
from paralign.parallel.context_call import CoreCall, CoreSignature
from paralign.parallel.context_dtensor import Wrapping, unwrap, unwrap_mask
from paralign.parallel.context_guards import SequenceProof, Sizes, check_call
from paralign.parallel.context_masks import (
    causal_rows,
    check_mask_is_causal,
    select_heads,
    select_rows,
)
from paralign.parallel.context_rules import SequencePlan, kv_repeats, order_of


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One rank's part in an axis: its chunks, and the groups it talks in."""

    axis: str
    plan: SequencePlan
    whole: dist.ProcessGroup
    exchange: dist.ProcessGroup | None  # all-to-all between tokens and heads
    gather: dist.ProcessGroup | None  # all-gather of K and V


class ContextForward:
    """Stands in for ``module.forward``; :meth:`restore` takes it away again."""

    def __init__(
        self,
        module: nn.Module,
        *,
        signature: CoreSignature,
        groups: Groups,
        seq_dim: int,
        head_dim: int,
        seq_len: int | None,
        guards: bool,
        positions_proven: bool,
    ) -> None:
        self.module = module
        self.core: Callable[..., Any] = module.forward
        self.was_instance_attribute = "forward" in vars(module)
        self.signature = signature
        self.groups = groups
        self.guards = guards
        plan = groups.plan
        self.sizes = Sizes(
            seq_dim=seq_dim,
            head_dim=head_dim,
            degree=plan.degree,
            inner=plan.inner,
            num_chunks=plan.num_chunks,
            seq_len=seq_len,
            axis=groups.axis,
        )
        self.proof = SequenceProof(seq_dim=seq_dim, axis=groups.axis, group=groups.whole)
        self.proof.done |= positions_proven or not guards
        if guards and groups.gather is not None:
            self._check_core_can_gather()

    def restore(self) -> None:
        """Give the module back the forward it had."""
        if self.was_instance_attribute:
            self.module.forward = self.core
        else:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the core on the whole sequence, whatever slice the arguments hold."""
        call = self.signature.read(args, kwargs)
        qkv, wrapping = self._unwrap(call)
        if self.guards:
            global_heads = (wrapping.global_shape if wrapping else qkv[0].shape)[
                self.sizes.head_dim
            ]
            check_call(
                call,
                qkv,
                sizes=self.sizes,
                global_heads=global_heads,
                module=self.module,
            )
            self.proof.check(qkv)
        mask = self._mask_of_heads(call, qkv[0], wrapping)
        if self.groups.exchange is not None:
            qkv = self._exchange(qkv, self.groups.exchange)
        if self.groups.gather is None:
            output = self._run(call, qkv, mask=mask)
        else:
            output = self._attend_gathered(call, qkv, mask, self.groups.gather)
        if self.groups.exchange is not None:
            output = all_to_all_dims(
                output,
                split_dim=self.sizes.seq_dim,
                concat_dim=self.sizes.head_dim,
                group=self.groups.exchange,
            )
        return output if wrapping is None else wrapping.wrap(output)

    def _unwrap(self, call: CoreCall) -> tuple[list[Tensor], Wrapping | None]:
        return unwrap(
            call.qkv,
            seq_dim=self.sizes.seq_dim,
            head_dim=self.sizes.head_dim,
            axis=self.sizes.axis,
            group=self.groups.whole,
        )

    def _exchange(self, qkv: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Exchange a slice of tokens with all heads for all tokens with a share of the heads."""
        q, k, v = qkv
        repeats = kv_repeats(k.shape[self.sizes.head_dim], self.sizes.inner) if self.guards else 1
        if repeats > 1:
            # Each head next to its copies, so that a rank's query heads meet their own K/V head;
            # autograd sums the copies' gradients.
            k, v = (x.repeat_interleave(repeats, self.sizes.head_dim) for x in (k, v))
        exchanged = fused_all_to_all_dims(
            (q, k, v), split_dim=self.sizes.head_dim, concat_dim=self.sizes.seq_dim, group=group
        )
        return list(exchanged)

    def _mask_of_heads(
        self, call: CoreCall, local_q: Tensor, wrapping: Wrapping | None
    ) -> Tensor | None:
        """Return the mask of the query heads that this rank will compute."""
        mask: Tensor | None = unwrap_mask(call.mask)
        if mask is None or not self.guards:
            return mask
        plan, num_local = self.groups.plan, local_q.shape[self.sizes.head_dim]
        has_global_heads = mask.ndim == 4 and mask.shape[1] not in (1, num_local)
        offset = wrapping.head_offset if wrapping is not None and has_global_heads else 0
        count = num_local // plan.inner
        return select_heads(mask, first=offset + plan.rank % plan.inner * count, count=count)

    def _attend_gathered(
        self, call: CoreCall, qkv: Sequence[Tensor], mask: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        """Attend from this rank's queries to the keys and values of all ranks."""
        dim, plan = self.sizes.seq_dim, self.groups.plan
        held = plan.after_exchange(plan.outer_index)
        q = _reorder(qkv[0], dim, order_of(held, plan.queries))
        k, v = self._gather(qkv[1:], group)
        size = k.shape[dim] // plan.num_chunks
        runs = [(first * size, stop * size) for first, stop in plan.runs]
        if mask is not None:
            if call.is_causal and self.guards:
                check_mask_is_causal(mask, core=self.signature.core)
            output = self._run(call, (q, k, v), mask=select_rows(mask, runs), is_causal=False)
        elif call.is_causal:
            output = self._run_causal(call, q, k, v, runs)
        else:
            output = self._run(call, (q, k, v))
        return _reorder(output, dim, order_of(plan.queries, held))

    def _gather(self, kv: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Gather K and V with one collective, and put the chunks of all ranks in global order."""
        dim, plan = self.sizes.seq_dim, self.groups.plan
        packed = torch.cat([x.flatten() for x in kv])
        stacked = all_gather_stack(packed, group=group)
        held = [chunk for outer in range(plan.outer) for chunk in plan.after_exchange(outer)]
        order = order_of(held, range(plan.num_chunks))
        gathered = []
        for part, x in zip(torch.split(stacked, [x.numel() for x in kv], 1), kv, strict=True):
            pieces = part.view(plan.outer, *x.shape).unbind(0)
            if plan.load_balance:
                size = x.shape[dim] * plan.outer // plan.num_chunks
                pieces = tuple(chunk for piece in pieces for chunk in torch.split(piece, size, dim))
                pieces = tuple(pieces[index] for index in order)
            gathered.append(torch.cat(pieces, dim))
        return gathered

    def _run_causal(
        self, call: CoreCall, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Call the core once for each contiguous run of queries, on the keys up to its last one.

        Keys after the run are cut away, not masked: that is where head-tail chunks save work. The
        rest of the causal rule is an explicit mask, because a core given fewer queries than keys
        would have to guess which positions they are.
        """
        dim = self.sizes.seq_dim
        if call.mask_key is None:
            raise LayoutError(
                f"{self.signature.core} was called with is_causal=True and has no mask parameter, "
                "but with gathered keys and values its queries are a slice of the sequence, so the "
                "causal rule must be passed as a mask. Give forward a mask parameter "
                "(mask_kwarg_name), or use ulysses_degree=None."
            )
        queries = torch.split(q, [stop - start for start, stop in runs], dim)
        outputs = [
            self._run(
                call,
                (piece, k.narrow(dim, 0, stop), v.narrow(dim, 0, stop)),
                mask=causal_rows(start, stop, device=q.device),
                is_causal=False,
            )
            for piece, (start, stop) in zip(queries, runs, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)

    def _run(
        self,
        call: CoreCall,
        qkv: Sequence[Tensor],
        *,
        mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        args, kwargs = call.replaced(qkv, mask=mask, is_causal=is_causal)
        output = self.core(*args, **kwargs)
        if self.guards:
            self._check_output(output, qkv[0])
        tensor: Tensor = output
        return tensor

    def _check_output(self, output: object, q: Tensor) -> None:
        if isinstance(output, Tensor) and output.shape[:-1] == q.shape[:-1]:
            return
        found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise LayoutError(
            f"{self.signature.core} returned {found} for q of shape {list(q.shape)}; it must "
            "return one tensor in q's layout (only the last dim may differ), so that tokens and "
            f"heads can be exchanged back (seq_dim={self.sizes.seq_dim}, "
            f"head_dim={self.sizes.head_dim}). Move a transpose or a second result out of the core."
        )

    def _check_core_can_gather(self) -> None:
        signature = self.signature
        if signature.mask_name is None and signature.causal_name is None:
            raise LayoutError(
                f"{signature.core}.forward({', '.join(signature.names)}) takes neither a mask nor "
                "is_causal, so a causal rule inside it would be built from the shapes of a slice "
                "of queries and be wrong with gathered keys and values. Give it a mask parameter "
                "(mask_kwarg_name) or use ulysses_degree=None, where it sees the whole sequence."
            )


def _reorder(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Put the equal chunks of ``dim`` into another order."""
    if list(order) == sorted(order):
        return x
    chunks = torch.split(x, x.shape[dim] // len(order), dim)
    return torch.cat([chunks[index] for index in order], dim)
