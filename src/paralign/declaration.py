"""What a plan does to every parameter: who holds it, and what its gradient is a sum of.

Declared before any rank starts, printed by ``paralign check``, and asserted against the tensors and
collectives of real runs by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from paralign.blueprint import Blueprint
from paralign.mesh import Axis, Degrees
from paralign.parallel.data import FSDP, ROOT_UNIT, plan_units
from paralign.parallel.stages import rank_of_stage
from paralign.parallel.support import Plan
from paralign.parallel.tensor import spreads_of
from paralign.parallel.tensor_base import TensorParallel
from paralign.parallel.tensor_weights import Spread
from paralign.parallel.tied import find_tied
from paralign.planning import all_experts, stage_of_parameters

# Every token is on exactly one rank of these axes, so a gradient there is a partial sum over them
# all. Over tp it is one for the parameters that the plan says so of.
TOKEN_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP)
# Tokens of all ranks of ep come to an expert, so what its rank has is their sum already.
EXPERT_AXES = (Axis.DP_REPLICATE, Axis.EFSDP)
EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        str(Axis.EFSDP): "shard(0)",
        str(Axis.EP): "shard(0)",
        str(Axis.PP): "stage",
        str(Axis.DP_REPLICATE): "replicate",
    }
)


@dataclass(frozen=True, kw_only=True)
class ParameterDeclaration:
    """The fate of one parameter on one stage.

    Attributes:
        name: Global name.
        shape: Global shape.
        trainable: Whether it gets a gradient.
        stage: Pipeline stage that uses it.
        pp_rank: Pipeline rank that runs the stage.
        unit: Modules gathered and reduced with it; empty: the stage's root.
        placements: Axis -> ``"shard(0)"``, ``"replicate"`` or ``"stage"``, for axes above size 1.
        partial_over: Axes over which the gradient of a rank's tokens is a partial sum, and over
            which it is summed exactly once a step. ``tp`` is one of them where a rank's part of the
            sequence, or of the heads, gives a part of the gradient.
        tied_to: Canonical name, when this is the second copy of a tied parameter on another stage;
            its gradient is summed with that copy's as well.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    stage: int
    pp_rank: int
    unit: str
    placements: Mapping[str, str]
    partial_over: tuple[str, ...]
    tied_to: str | None


def declare(
    model: nn.Module,
    blueprint: Blueprint,
    *,
    degrees: Degrees,
    plan: Plan,
    fsdp: FSDP,
    tensor: TensorParallel | None = None,
) -> list[ParameterDeclaration]:
    """Declare every parameter of ``model``, in model order. Works on the meta device; no ranks.

    Args:
        model: The whole model.
        blueprint: How it is cut.
        degrees: Size of every axis.
        plan: The resolved plan.
        fsdp: How parameters are grouped into units.
        tensor: How layers are spread over tp; default with sequence parallel.
    """
    owners = stage_of_parameters(model, blueprint, plan)
    aliases = find_tied(model)
    units = _unit_of_names(model, blueprint, owners, fsdp)
    placements = {str(axis): "shard(0)" for axis in (Axis.DP_SHARD, Axis.CP)}
    placements |= {str(Axis.PP): "stage", str(Axis.DP_REPLICATE): "replicate"}
    spreads: dict[str, Spread] = {}
    if degrees.tp > 1:
        spreads = spreads_of(
            model,
            blueprint.tensor_parallel(),
            degree=degrees.tp,
            options=tensor or TensorParallel(),
        )
    experts = _expert_names(model, blueprint) if degrees.spreads_experts else {}
    declared = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = aliases.get(name)
        if canonical is not None and owners[canonical] == owners[name]:
            continue  # one Parameter under two names, declared under the first
        declared.append(
            ParameterDeclaration(
                name=name,
                shape=tuple(parameter.shape),
                trainable=parameter.requires_grad,
                stage=owners[name],
                pp_rank=rank_of_stage(plan.kind, plan.pp, owners[name]),
                unit=experts.get(name, units.get(name, ROOT_UNIT)),
                placements={
                    **{
                        a: p
                        for a, p in (EXPERTS if name in experts else placements).items()
                        if degrees.degree(a) > 1
                    },
                    **({str(Axis.TP): str(spreads[name])} if name in spreads else {}),
                },
                partial_over=(
                    *(
                        str(a)
                        for a in (EXPERT_AXES if name in experts else TOKEN_AXES)
                        if degrees.degree(a) > 1
                    ),
                    *([str(Axis.TP)] if name in spreads and spreads[name].is_partial else []),
                ),
                tied_to=canonical,
            )
        )
    return declared


def _expert_names(model: nn.Module, blueprint: Blueprint) -> dict[str, str]:
    """Return parameter of an expert -> the stack it is in, which is a unit of its own."""
    return {
        f"{stack}.{name}": stack
        for stack in all_experts(model, blueprint)
        for name, _ in model.get_submodule(stack).named_parameters()
    }


def _unit_of_names(
    model: nn.Module, blueprint: Blueprint, owners: Mapping[str, int], fsdp: FSDP
) -> dict[str, str]:
    """Return parameter -> the unit that holds it, without those of the root unit."""
    modules = model.named_modules(remove_duplicate=False)
    stages: dict[str, set[int]] = {name: set() for name, _ in modules if name}
    for name, stage in owners.items():
        for module in _modules_around(name):
            stages[module].add(stage)
    unit_of: dict[str, str] = {}  # module -> unit; of two around a parameter the first counts
    for stage in sorted(set(owners.values())):
        here = [name for name, on in stages.items() if stage in on]
        layers = [name for name in here if _is_layer(name, blueprint.layers_name)]
        # Containers that reach over several stages are no module of this one.
        for unit in plan_units(fsdp.wrap, layers, [n for n in here if len(stages[n]) == 1]):
            unit_of |= {name: "+".join(unit) for name in unit}
    order = {name: number for number, name in enumerate(unit_of)}
    found = {}
    for name in owners:
        if around := [module for module in _modules_around(name) if module in unit_of]:
            found[name] = unit_of[min(around, key=order.__getitem__)]
    return found


def _modules_around(parameter: str) -> list[str]:
    """Return the names of all modules that a parameter is inside of, the outermost first."""
    parts = parameter.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _is_layer(name: str, layers_name: str) -> bool:
    return name.startswith(f"{layers_name}.") and name.removeprefix(f"{layers_name}.").isdigit()
