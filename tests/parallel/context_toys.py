"""A core, masks and cases for the tests of context parallel, and the comparison with one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paralign.parallel.context import ContextParallel, split_sequence_indices
from paralign.parallel.context_rules import LAYOUTS

ROWS, HEADS, SEQ_LEN, WIDTH = 2, 4, 16, 6
BUDGET = 100 * torch.finfo(torch.float64).eps  # measured: at most 4 eps
NAMES = ("output", "dq", "dk", "dv")


class PlainCore(nn.Module):
    """Attention written out in any layout, so that it shares no code with what is tested."""

    def __init__(self, layout: str = "BNSD") -> None:
        super().__init__()
        self.seq_dim, self.head_dim = LAYOUTS[layout]
        self.calls: list[tuple[int, int]] = []  # queries and keys of each call

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        q, k, v = (self._to_bnsd(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        self.calls.append((scores.shape[-2], scores.shape[-1]))
        if is_causal:
            assert mask is None, "one of both"
            mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return self._from_bnsd(scores.softmax(-1) @ v)

    def _to_bnsd(self, x: Tensor) -> Tensor:
        (row_dim,) = {0, 1, 2} - {self.seq_dim, self.head_dim}
        return x.permute(row_dim, self.head_dim, self.seq_dim, 3)

    def _from_bnsd(self, x: Tensor) -> Tensor:
        (row_dim,) = {0, 1, 2} - {self.seq_dim, self.head_dim}
        order = {row_dim: 0, self.head_dim: 1, self.seq_dim: 2, 3: 3}
        return x.permute(*(order[dim] for dim in range(4)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run attention over ``cp`` ranks."""

    cp: int
    ulysses_degree: int | None = None
    load_balance: bool = False
    layout: str = "BNSD"
    num_kv_heads: int = HEADS
    mask: str = "none"  # see build_mask; "causal" is the flag
    value_width: int = WIDTH

    def __str__(self) -> str:
        mode = {None: "ulysses", 1: "gather"}.get(self.ulysses_degree, f"u{self.ulysses_degree}")
        balance = "-balanced" if self.load_balance else ""
        sizes = f"kv{self.num_kv_heads}-v{self.value_width}"
        return f"cp{self.cp}-{mode}{balance}-{self.layout}-{sizes}-{self.mask}"


def build_mask(kind: str) -> Tensor | None:
    """Return a global mask: none, window, per_head, additive or padding."""
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(SEQ_LEN)
    causal = places <= places[:, None]
    if kind == "window":
        return causal & (places > places[:, None] - 4)
    if kind == "per_head":
        noise = torch.rand(ROWS, HEADS, SEQ_LEN, SEQ_LEN, generator=generator) > 0.4
        return noise | torch.eye(SEQ_LEN, dtype=torch.bool)
    if kind == "additive":
        return torch.randn(
            ROWS, 1, SEQ_LEN, SEQ_LEN, generator=generator, dtype=torch.float64
        ).masked_fill(~causal, float("-inf"))
    if kind == "padding":
        return (places < torch.tensor([SEQ_LEN - 3, SEQ_LEN])[:, None])[:, None, None, :]
    return None


def build_tensors(case: Case) -> list[Tensor]:
    """Return global q, k, v and output gradient in the case's layout, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    seq_dim, head_dim = LAYOUTS[case.layout]
    (row_dim,) = {0, 1, 2} - {seq_dim, head_dim}
    tensors = []
    for heads, width in (
        (HEADS, WIDTH),
        (case.num_kv_heads, WIDTH),
        (case.num_kv_heads, case.value_width),
        (HEADS, case.value_width),
    ):
        shape = {row_dim: ROWS, seq_dim: SEQ_LEN, head_dim: heads, 3: width}
        sizes = [shape[dim] for dim in range(4)]
        tensors.append(torch.randn(sizes, generator=generator, dtype=torch.float64))
    return tensors


def run(core: nn.Module, tensors: Sequence[Tensor], **kwargs: object) -> list[Tensor]:
    """Return output, dq, dk, dv."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    output = core(q, k, v, **kwargs)
    output.backward(tensors[3])
    return [output.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative Frobenius error."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found - wanted).norm() / wanted.norm())


def cp_mesh() -> DeviceMesh:
    """Return the mesh of a world that is one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def measure(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """Return the relative errors of this rank's output, dq, dk and dv against one device."""
    tensors, mask = build_tensors(case), build_mask(case.mask)
    arguments: dict[str, object] = {"is_causal": True} if case.mask == "causal" else {}
    if mask is not None:
        arguments["mask"] = mask
    wanted = run(PlainCore(case.layout), tensors, **arguments)
    style = ContextParallel(
        layout=case.layout,
        ulysses_degree=case.ulysses_degree,
        load_balance=case.load_balance,
        seq_len=SEQ_LEN,
    )
    core = style.apply(PlainCore(case.layout), mesh)
    held = split_sequence_indices(
        SEQ_LEN, case.cp, mesh.get_local_rank(), load_balance=case.load_balance
    )
    seq_dim = style.seq_dim
    found = run(core, [x.index_select(seq_dim, held) for x in tensors], **arguments)
    return {
        name: relative_error(ours, reference.index_select(seq_dim, held))
        for name, ours, reference in zip(NAMES, found, wanted, strict=True)
    }
