"""The MoE layer against four plain forms of the same sum, and what it sends over ep.

    python -m bench.moe [--check]

192 experts, top 10, hidden 256, expert hidden 512, float32, forward and backward of the experts at
64, 1,024 and 8,192 tokens. All forms take turns, so that a busy machine slows them alike; the
median over the rounds of paralign's time by that of each other form counts.

Peak memory of a forward and backward, gradients included, is what the system says of a process of
its own (Linux only). The padded form is measured at its best as well: with tokens spread evenly
over the experts, so that hardly a row is padding.

Last, one world of four ranks counts the bytes that dispatch and combine send, against the rows that
have to travel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench._rounds import Times, median_ratio, median_seconds, turns
from paralign.models.experts import Experts
from paralign.parallel.expert import ExpertParallel
from paralign.testing import run_on_ranks

E, K, D, H = 192, 10, 256, 512
TOKENS = (64, 1024, 8192)
ROUNDS = {64: 25, 1024: 25, 8192: 15}
SLOWER = 1.05  # at most, than the fastest other form
SENT = 1.15  # bytes at most, of those that have to travel
Form = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, choices and weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, D, generator=generator).requires_grad_()
    weights, indices = torch.rand(tokens, E, generator=generator).topk(K)
    return x, indices, weights.clone().requires_grad_()


def ours(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Run paralign's layer."""
    out: Tensor = experts(x, indices, weights)
    return out


def masks(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Loop over experts; a mask finds the tokens of each."""
    out = torch.zeros_like(x)
    parts = zip(experts.gate.unbind(0), experts.up.unbind(0), experts.down.unbind(0), strict=True)
    for e, (gate, up, down) in enumerate(parts):
        token, choice = (indices == e).nonzero(as_tuple=True)
        rows = x[token]
        y = (F.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
        out = out.index_add(0, token, y * weights[token, choice].unsqueeze(-1))
    return out


def _sorted(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = indices.flatten().argsort(stable=True)
    token = order // K
    return order, token, x.index_select(0, token)


def _summed(x: Tensor, y: Tensor, order: Tensor, token: Tensor, weights: Tensor) -> Tensor:
    weighted = y * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, weighted)


def sorted_(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Sort rows by expert, then one matmul an expert."""
    order, token, rows = _sorted(x, indices)
    counts = indices.flatten().bincount(minlength=E).tolist()
    parts = zip(
        rows.split(counts),
        experts.gate.unbind(0),
        experts.up.unbind(0),
        experts.down.unbind(0),
        strict=True,
    )
    y = torch.cat([(F.silu(r @ g.t()) * (r @ u.t())) @ d.t() for r, g, u, d in parts])
    return _summed(x, y, order, token, weights)


def grouped(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Sort rows by expert, then torch's grouped matmul."""
    order, token, rows = _sorted(x, indices)
    ends = indices.flatten().bincount(minlength=E).cumsum(0).int()
    gate = F.grouped_mm(rows, experts.gate.transpose(1, 2), offs=ends)
    up = F.grouped_mm(rows, experts.up.transpose(1, 2), offs=ends)
    y = F.grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends)
    return _summed(x, y, order, token, weights)


def padded(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Pad every expert's rows to the fullest one's, then batched matmuls."""
    order, token, rows = _sorted(x, indices)
    expert = indices.flatten()[order]
    counts = indices.flatten().bincount(minlength=E)
    most = int(counts.max())
    place = expert * most + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
    full = rows.new_zeros(E * most, D).index_copy(0, place, rows).view(E, most, D)
    gate, up = torch.bmm(full, experts.gate.mT), torch.bmm(full, experts.up.mT)
    y = torch.bmm(F.silu(gate) * up, experts.down.mT).flatten(0, 1).index_select(0, place)
    return _summed(x, y, order, token, weights)


FORMS: dict[str, Form] = {
    "ours": ours,
    "masks": masks,
    "sorted": sorted_,
    "grouped_mm": grouped,
    "padded": padded,
}


def timed(form: Form, experts: Experts, tokens: int) -> float:
    """Return the seconds of one forward and backward."""
    given = inputs(tokens)
    for parameter in experts.parameters():
        parameter.grad = None
    began = time.perf_counter()
    form(experts, *given).sum().backward()
    return time.perf_counter() - began


def times(tokens: int) -> list[Times]:
    """Return the seconds of every form, round by round, taking turns."""
    experts = Experts(E, D, H, bias=False)
    rounds = [
        {name: timed(FORMS[name], experts, tokens) for name in turns(list(FORMS), number)}
        for number in range(ROUNDS[tokens] + 1)
    ]
    return rounds[1:]  # the first warms up


def peak_memory(name: str, tokens: int, even: bool) -> float:
    """Return the MiB that one forward and backward adds at its peak, in a process of its own."""
    command = [sys.executable, "-m", "bench.moe", "--memory-of", name, str(tokens), str(int(even))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout)


def _peak_memory_here(name: str, tokens: int, even: bool) -> float:
    experts = Experts(E, D, H, bias=False)
    x, indices, weights = inputs(tokens)
    if even:
        indices = (torch.arange(tokens * K) % E).view(tokens, K)
    small = Experts(E, D, 4, bias=False)  # loads what is loaded at the first use
    FORMS[name](small, torch.zeros(8, D), indices[:8], weights[:8]).sum().backward()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    FORMS[name](experts, x, indices, weights).sum().backward()
    return _resident("VmHWM") - before


def _resident(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def traffic(tokens: int) -> tuple[int, int]:
    """Return bytes this rank sends for one forward, and the least that have to travel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts = ExpertParallel().apply(Experts(E, D, H, bias=False), mesh)
    me, n = mesh.get_local_rank(), mesh.size()
    x, indices, weights = inputs(tokens)
    sent, real = [0], dist.all_to_all_single

    def counted(output: Any, given: Any, *splits: Any, **rest: Any) -> Any:
        own = splits[1][me] if len(splits) == 2 else given.shape[0] // n
        row = given[:1].numel() * given.element_size()
        sent[0] += row * (given.shape[0] - own)
        return real(output, given, *splits, **rest)

    with mock.patch.object(dist, "all_to_all_single", counted):
        experts(x, indices, weights)
    goes = torch.zeros(tokens, n, dtype=torch.bool).scatter_(1, indices // (E // n), True)
    goes[:, me] = False
    # Each token once there, and one row back for each token of the others: as many, by symmetry.
    return sent[0], 2 * int(goes.sum()) * D * x.element_size()


def report_times() -> bool:
    """Print the times and return whether paralign's are within the target."""
    within = True
    others = [name for name in FORMS if name != "ours"]
    print("| seconds, tokens | " + " | ".join(FORMS) + " | ours / fastest |")
    print("|---" * (len(FORMS) + 2) + "|")
    for tokens in TOKENS:
        rounds = times(tokens)
        ratio = max(median_ratio(rounds, "ours", other) for other in others)
        cells = " | ".join(f"{median_seconds(rounds, name):.3f}" for name in FORMS)
        print(f"| {tokens:,} | {cells} | {ratio:.2f} |", flush=True)
        within &= ratio <= SLOWER
    return within


def report_memory() -> bool:
    """Print the peaks and return whether paralign's is at most the padded form's best."""
    within = True
    print("\n| peak MiB, tokens | " + " | ".join(FORMS) + " | padded, even |")
    print("|---" * (len(FORMS) + 2) + "|")
    for tokens in TOKENS:
        found = {name: peak_memory(name, tokens, False) for name in FORMS}
        best = min(peak_memory("padded", tokens, True), found["padded"])
        cells = " | ".join(f"{peak:.0f}" for peak in (*found.values(), best))
        print(f"| {tokens:,} | {cells} |", flush=True)
        within &= found["ours"] <= best
    return within


def main() -> int:
    """Print all results; with ``--check`` return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        name, tokens, even = options.memory_of
        print(_peak_memory_here(name, int(tokens), even == "1"))
        return 0
    within = report_times() & report_memory()
    sent, least = run_on_ranks(traffic, 4, 1024)[0]
    print(f"\nep=4, 1,024 tokens a rank: {sent} bytes sent, {least} must: {sent / least:.3f}")
    within &= sent / least <= SENT
    return 1 if options.check and not within else 0


if __name__ == "__main__":
    sys.exit(main())
