"""Four ways to wire context parallel, of which one is right: what each costs, and who notices.

    python examples/context_parallel_matrix.py

Attention over two ranks, q, k and v of layout BNSD = [1, 32, 32, 64]: 32 heads, 32 tokens, 64
features. ``head_dim`` points at the features (3) or at the heads (1); each rank is fed the whole
sequence or its slice. All sizes divide, so nothing in torch objects to any of the four.
"""

from __future__ import annotations

import textwrap

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paralign.errors import LayoutError
from paralign.models.attention import CausalAttention
from paralign.parallel.context import ContextParallel, split_sequence_indices
from paralign.testing import run_on_ranks

DEGREE = 2
ROWS, HEADS, TOKENS, FEATURES = 1, 32, 32, 64
INDENT = " " * 6
COMBINATIONS = [
    (head_dim, feeding) for head_dim in (3, 1) for feeding in ("whole sequence", "slices")
]


def run(head_dim: int, feeding: str, guards: bool) -> float | str:
    """Return the largest difference from one device on this rank's tokens, or the refusal."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, HEADS, TOKENS, FEATURES)
    qkv = [torch.randn(shape, generator=generator) for _ in range(3)]
    one_device = CausalAttention()(*qkv)

    tokens = torch.arange(TOKENS)
    if feeding == "slices":
        tokens = split_sequence_indices(TOKENS, DEGREE, dist.get_rank())
    mesh = init_device_mesh("cpu", (DEGREE,), mesh_dim_names=("cp",))
    try:
        style = ContextParallel(seq_dim=2, head_dim=head_dim, guards=guards)
        core = style.apply(CausalAttention(), mesh)
        output = core(*(x[:, :, tokens] for x in qkv))
    except LayoutError as error:
        return str(error)
    return float((output - one_device[:, :, tokens]).abs().max())


def run_all(guards: bool) -> list[float | str]:
    """Run the four combinations; called on every rank."""
    torch.set_num_threads(1)
    return [run(head_dim, feeding, guards) for head_dim, feeding in COMBINATIONS]


def combine(results: tuple[float | str, ...]) -> float | str:
    """Return the worst rank's difference, or the refusal that all ranks share."""
    refusals = {result for result in results if isinstance(result, str)}
    if refusals:
        return " / ".join(sorted(refusals))
    return max(float(result) for result in results)


def main() -> None:
    """Print both halves of the experiment."""
    print(f"cp={DEGREE}, BNSD = [{ROWS}, {HEADS}, {TOKENS}, {FEATURES}], causal, fp32")
    for guards in (False, True):
        print(f"\nguards {'on' if guards else 'off'}: largest difference from one device")
        by_rank = run_on_ranks(run_all, DEGREE, guards)
        for (head_dim, feeding), results in zip(
            COMBINATIONS, zip(*by_rank, strict=True), strict=True
        ):
            result = combine(results)
            label = f"  head_dim={head_dim}  {feeding:14s}  "
            if isinstance(result, str):
                print(f"{label}REFUSED")
                print(textwrap.fill(result, 92, initial_indent=INDENT, subsequent_indent=INDENT))
            else:
                print(f"{label}{result:<8.6g}  {'MATCH' if result == 0 else 'MISMATCH'}")


if __name__ == "__main__":
    main()
