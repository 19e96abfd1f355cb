"""Data parallelism: replicate and shard parameters with FSDP2, context parallel ranks folded in.

Parameters are sharded over ``fsdp = dp_shard x cp`` and, with ``dp_replicate > 1``, replicated over
the rest. Every gradient is a plain sum: losses are divided by the global token count before the
backward pass, so no average whose meaning depends on an axis size is left anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paralign.errors import LayoutError
from paralign.mesh import Axis, expert_mesh, fold

# Fields of a precision: parts of the model that may stay in float32.
PARTS = ("softmax", "logits", "residual")
ROOT_UNIT = ""  # the unit of everything that no other unit holds


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """How parameters are grouped into units that are gathered and reduced together.

    Attributes:
        wrap: ``"root"`` (one unit a stage), ``"blocks"`` (each layer, and the rest),
            ``"first_block"`` (each stage's first layer, and the rest), or lists of module names,
            one list a unit. What no unit holds belongs to the stage's root, which is always
            wrapped.
        reshard_after_forward: Free gathered parameters between forward and backward; None is
            torch's default (units yes, root no).
    """

    wrap: str | Sequence[Sequence[str]] = "blocks"
    reshard_after_forward: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a step. Parameters keep their own dtype as master weights.

    Attributes:
        compute: Dtype of parameters and activations in forward and backward; None: the parameters'
            own.
        reduce: Dtype in which gradients are accumulated and reduced; None: the parameters' own.
        softmax: float32: attention scores, their softmax and the weighted sum; None: as the
            attention core does it in the compute dtype.
        logits: float32: the product with the head's weight; None: the compute dtype. The loss is
            computed in float32 at least, whatever this is.
        residual: float32: the stream that layers add to, and norms of it; None: the compute dtype.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    softmax: torch.dtype | None = None
    logits: torch.dtype | None = None
    residual: torch.dtype | None = None


class ReductionCounter:
    """Counts the gradient reductions of every unit in one step.

    Attributes:
        counts: Unit -> reductions in this step.
        parameters: Unit -> global names of its parameters.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.parameters: dict[str, list[str]] = {}

    def watch(self, unit: str, module: FSDPModule, parameters: Sequence[str]) -> None:
        """Count the reductions of ``module`` under the name ``unit``."""
        self.counts[unit] = 0
        self.parameters[unit] = list(parameters)

        def count(_: torch.Tensor) -> None:
            self.counts[unit] += 1

        module.set_all_reduce_hook(count)

    def reset(self) -> None:
        """Start a new step."""
        for unit in self.counts:
            self.counts[unit] = 0


def plan_units(
    wrap: str | Sequence[Sequence[str]], layer_names: Sequence[str], module_names: Sequence[str]
) -> list[list[str]]:
    """Return the modules of each unit of a stage; the root holds the rest and is not listed.

    Args:
        wrap: See :class:`FSDP`.
        layer_names: Global names of the stage's layers, in order.
        module_names: Global names of all modules in the stage. Names in ``wrap`` that are on
            another stage are left to that stage.
    """
    if wrap == "root":
        return []
    if wrap == "blocks":
        return [[name] for name in layer_names]
    if wrap == "first_block":
        return [[name] for name in layer_names[:1]]
    assert not isinstance(wrap, str)
    here = set(module_names)
    units = [[name for name in unit if name in here] for unit in wrap]
    return [unit for unit in units if unit]


def check_units(wrap: str | Sequence[Sequence[str]], module_names: Sequence[str]) -> None:
    """Raise unless every listed unit names existing modules, none of them twice or inside another.

    Args:
        wrap: See :class:`FSDP`.
        module_names: Names of all modules of the whole model.

    Raises:
        LayoutError: Lists every name that breaks the rule.
    """
    if isinstance(wrap, str):
        return
    listed = [name for unit in wrap for name in unit]
    known, problems = set(module_names), []
    for position, name in enumerate(listed):
        if name not in known:
            near = [other for other in module_names if other.endswith(f".{name}")]
            near = near or get_close_matches(name, module_names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            problems.append(f"{name!r} matches no module of the model.{hint}")
        for other in listed[:position]:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                problems.append(f"{name!r} and {other!r} overlap: a parameter belongs to one unit.")
    if problems:
        raise LayoutError.from_problems("fsdp wrap lists units that cannot be made", problems)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh to shard over: ``fsdp``, or ``dp_replicate x fsdp`` for hybrid sharding."""
    shard = fold(mesh, Axis.FSDP)
    if mesh[str(Axis.DP_REPLICATE)].size() == 1:
        return shard
    return DeviceMesh._concatenate([mesh[str(Axis.DP_REPLICATE)], shard])


def experts_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh to shard experts over: ``efsdp``, or ``dp_replicate x efsdp``."""
    shard = expert_mesh(mesh)[str(Axis.EFSDP)]
    if mesh[str(Axis.DP_REPLICATE)].size() == 1:
        return shard
    return DeviceMesh._concatenate([mesh[str(Axis.DP_REPLICATE)], shard])


def apply_fsdp(
    stage: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[Sequence[str]],
    experts: Sequence[str] = (),
    reshard_after_forward: bool | None,
    precision: Precision,
    counter: ReductionCounter,
    label: str = "",
) -> nn.Module:
    """Shard the parameters of ``stage`` in place, one communication group a unit.

    Comm (per step, n ranks in ``fsdp``, P parameter elements of a unit, M micro-batches):
        forward and backward: one all-gather of P, or ``M + 1`` with ``reshard_after_forward``: the
        pipeline keeps what a backward pass has gathered until the next forward pass frees it.
        after the last micro-batch: one reduce-scatter of P, and with ``dp_replicate`` one
        all-reduce of ``P / n``. Sums, never averages.

    Args:
        stage: A stage, or a whole model. Its root is always wrapped, even when it owns no
            parameter: without a root the engine reduces once per micro-batch.
        mesh: The run's mesh.
        units: Names of the modules of every unit besides the root.
        experts: Modules that are spread over ep: each is a unit of its own, sharded over what ep
            leaves (``efsdp``). They may lie inside other units.
        reshard_after_forward: See :class:`FSDP`.
        precision: Dtypes of the step.
        counter: Told about every reduction.
        label: Prefix of unit names in ``counter``, to tell a rank's stages apart.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute,
        reduce_dtype=precision.reduce,
        # A unit's inputs are the stream, which has its own dtype, the context (positions, token
        # weights) and the weights of a token's experts, which one device does not round either.
        cast_forward_inputs=False,
    )

    rest = [name for name, _ in stage.named_parameters()]

    def shard(
        modules: list[nn.Module], name: str, owned: Sequence[str], *, is_expert: bool = False
    ) -> None:
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=experts_mesh(mesh) if is_expert else fsdp_mesh(mesh),
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
        )
        owner = modules[0]
        assert isinstance(owner, FSDPModule)
        # Both are needed, on every unit: the factor is not recursive, and alone it becomes a
        # reduction with a factor inside, which gloo lacks.
        owner.set_force_sum_reduction_for_comms(True)
        owner.set_gradient_divide_factor(1.0)
        counter.watch(f"{label}{name}", owner, owned)

    for name in experts:
        owned = [p for p in rest if p.startswith(f"{name}.")]
        rest = [p for p in rest if p not in owned]
        shard([stage.get_submodule(name)], name, owned, is_expert=True)
    for unit in units:
        owned = [p for p in rest if any(p.startswith(f"{name}.") for name in unit)]
        rest = [p for p in rest if p not in owned]
        shard([stage.get_submodule(name) for name in unit], "+".join(unit), owned)
    shard([stage], ROOT_UNIT, rest)
    return stage


def free_gathered(stage: nn.Module) -> None:
    """Free what a forward pass without a backward pass has gathered, in every unit of ``stage``.

    A unit that stays gathered would compute the next forward pass with old parameters.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
