"""Tied parameters: one parameter used by two pieces, wherever the pipeline puts them.

Two uses on one stage stay one ``Parameter`` in one FSDP unit. On different stages each holds a copy
that starts equal; after every step both gradients become their sum, so that the optimizer moves
both copies alike::

    first stage   embedding.weight   grad e  ->  e + h
    last stage    head.weight        grad h  ->  h + e
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.errors import ConfigError, LayoutError
from paralign.mesh import Axis
from paralign.parallel.stage import Stage


def find_tied(model: nn.Module) -> dict[str, str]:
    """Return alias -> canonical name for every parameter that has more than one name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


@dataclass(frozen=True, kw_only=True)
class TiedPair:
    """Two copies of one parameter on different stages.

    Attributes:
        canonical: The name that checkpoints and traces use; its copy counts in the gradient norm.
        alias: The name of the other copy.
        stages: Stage indices of the canonical copy and of the alias.
        ranks: Pipeline ranks of both.
    """

    canonical: str
    alias: str
    stages: tuple[int, int]
    ranks: tuple[int, int]


def untie(stages: Mapping[int, Stage], pairs: Sequence[TiedPair]) -> None:
    """Give each copy its own ``Parameter``: two FSDP roots must not share one."""
    for pair in pairs:
        stage = stages.get(pair.stages[1])
        if stage is None:
            continue
        path, _, leaf = pair.alias.rpartition(".")
        owner = stage.get_submodule(path)
        shared = getattr(owner, leaf)
        copy = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        setattr(owner, leaf, copy)


def check_pairs(aliases: Mapping[str, str], owners: Mapping[str, int]) -> None:
    """Raise unless every tied parameter is used by at most two stages.

    Args:
        aliases: Alias -> canonical name.
        owners: Parameter name -> stage index.

    Raises:
        ConfigError: A parameter is shared by more stages, such as by the layers of a looped model.
    """
    problems = []
    for canonical in dict.fromkeys(aliases.values()):
        names = [canonical, *(a for a, c in aliases.items() if c == canonical)]
        if len({owners[name] for name in names}) < len(names) and len(names) > 2:
            problems.append(f"{', '.join(names)} are one parameter used {len(names)} times")
        elif len(names) > 2:
            problems.append(f"{', '.join(names)} are one parameter on {len(names)} stages")
    if problems:
        raise ConfigError.from_problems(
            "a tied parameter has at most two names, such as embedding and head", problems
        )


def check_units_of_pairs(
    aliases: Mapping[str, str],
    owners: Mapping[str, int],
    units: Mapping[int, Sequence[Sequence[str]]],
) -> None:
    """Raise unless both names of a parameter that one stage uses belong to one FSDP unit.

    Args:
        aliases: Alias -> canonical name.
        owners: Parameter name -> stage index.
        units: Stage index -> modules of each unit besides the root.

    Raises:
        LayoutError: Two units would both gather and reduce one parameter.
    """
    problems = []
    for alias, canonical in aliases.items():
        stage = owners[canonical]
        if owners[alias] != stage:
            continue  # each stage gets a copy of its own
        first, second = (_unit_of(name, units[stage]) for name in (canonical, alias))
        if first != second:
            problems.append(
                f"{canonical} and {alias} are one parameter on stage {stage}, in two units: "
                f"{first} and {second}. List both modules in one unit, or leave both to the root"
            )
    if problems:
        raise LayoutError.from_problems("a tied parameter belongs to one fsdp unit", problems)


def _unit_of(parameter: str, units: Sequence[Sequence[str]]) -> str:
    for unit in units:
        if any(parameter.startswith(f"{module}.") for module in unit):
            return repr("+".join(unit))
    return "the root"


def sum_pair(
    pair: TiedPair,
    canonical: nn.Parameter | None,
    alias: nn.Parameter | None,
    mesh: DeviceMesh,
) -> None:
    """Replace the gradients of both copies by their sum.

    Comm:
        If the copies are on different pipeline ranks, each sends its shard of the gradient to the
        other. The sum is bitwise equal on both sides.

    Args:
        pair: Which copies.
        canonical: The copy on this rank, or None.
        alias: The copy on this rank, or None.
        mesh: The run's mesh.
    """
    grads = [_local(p) for p in (canonical, alias) if p is not None and p.grad is not None]
    if not grads:
        return
    if pair.ranks[0] == pair.ranks[1]:
        total = grads[0] + grads[1]
        for grad in grads:
            grad.copy_(total)
        return
    group = mesh[str(Axis.PP)].get_group()
    other = pair.ranks[1] if canonical is not None else pair.ranks[0]
    peer = dist.get_global_rank(group, other)
    sent = grads[0].contiguous()
    received = torch.empty_like(sent)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
    )
    for work in works:
        work.wait()
    grads[0].add_(received)


def _local(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local
