"""Sizes and choices of a mixture of experts, shared by the model families. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from paralign.mesh import Degrees
from paralign.models.rules import divide_problem, is_number, is_whole, split_problem


@dataclass(frozen=True, kw_only=True)
class MoeSizes:
    """Hyper-parameters of the layers with experts; ``num_experts=0`` makes every layer dense."""

    num_experts: int = 0  # 0: no layer has experts
    top_k: int = 2  # experts that a token is sent to
    expert_hidden_size: int = 0
    shared_hidden_size: int = 0  # of the expert that every token passes; 0: there is none
    num_dense_layers: int = 0  # first layers that keep one feed-forward
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalise: Literal["none", "sum", "softmax"] = "sum"  # of the selected scores
    router_scaling: float = 1.0  # of the weights, after that
    num_expert_groups: int = 1  # neighbouring experts make a group
    num_limited_groups: int = 1  # groups that a token's experts come from
    balance_loss: float = 0.0  # coefficient of the sequence-wise balance loss; 0: off
    bias_update_speed: float = 0.0  # what a router bias moves by in a step; 0: no bias

    @property
    def has_experts(self) -> bool:
        """Whether any layer can have experts."""
        return self.num_experts > 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer ``index`` has experts."""
        return self.has_experts and index >= self.num_dense_layers

    def moe_problems(self) -> list[str]:
        """Return every rule that these sizes break, one sentence each."""
        found = _ranges(self)
        if found:
            return found
        if not self.has_experts:
            return [] if self == replace(self, **_defaults()) else [_unused(self)]
        groups = self.num_expert_groups
        found = divide_problem("num_experts", self.num_experts, "num_expert_groups", groups)
        if self.num_limited_groups > groups:
            found.append(
                f"num_limited_groups={self.num_limited_groups} is more than num_expert_groups="
                f"{groups}. Use num_limited_groups={groups}, which limits nothing, or fewer."
            )
        elif not found:
            reachable = self.num_experts // groups * self.num_limited_groups
            if self.top_k > reachable:
                found.append(
                    f"top_k={self.top_k} is more than the {reachable} experts that a token can "
                    f"reach (num_experts={self.num_experts}, {self.num_limited_groups} of {groups} "
                    f"groups). Use top_k={reachable} or less."
                )
        if self.router_normalise == "softmax" and self.router_score == "softmax":
            found.append(
                "router_normalise=softmax takes a softmax of the selected scores, which with "
                "router_score=softmax are probabilities already. Use router_normalise=sum, or "
                "router_score=sigmoid."
            )
        return found


def expert_parallel_problems(sizes: MoeSizes, degrees: Degrees) -> list[str]:
    """Return what keeps experts from this mesh, one sentence each."""
    if degrees.ep == 1:
        return []
    if not sizes.has_experts:
        return [f"ep={degrees.ep} splits experts, but num_experts=0: no layer has any. Use ep=1."]
    return split_problem("num_experts", sizes.num_experts, degrees.ep, "ep")


def _ranges(sizes: MoeSizes) -> list[str]:
    least = {"num_experts": 0, "shared_hidden_size": 0, "num_dense_layers": 0}
    counts = ("top_k", "num_expert_groups", "num_limited_groups")
    least |= dict.fromkeys(counts, 1)
    least["expert_hidden_size"] = 1 if sizes.num_experts else 0
    found = [
        f"{name}={value!r} must be a whole number of at least {smallest}"
        for name, smallest in least.items()
        if not is_whole(value := getattr(sizes, name)) or value < smallest
    ]
    choices = {
        "router_score": ("softmax", "sigmoid"),
        "router_normalise": ("none", "sum", "softmax"),
    }
    found += [
        f"{name}={value!r} must be one of {', '.join(known)}"
        for name, known in choices.items()
        if (value := getattr(sizes, name)) not in known
    ]
    found += [
        f"{name}={value!r} must be a number of at least 0"
        for name in ("balance_loss", "bias_update_speed")
        if not is_number(value := getattr(sizes, name)) or not 0 <= value < float("inf")
    ]
    scaling = sizes.router_scaling
    if not is_number(scaling) or not 0 < scaling < float("inf"):
        found.append(f"router_scaling={scaling!r} must be a number above 0")
    return found


def _defaults() -> dict[str, Any]:
    names = MoeSizes.__dataclass_fields__
    return {name: field.default for name, field in names.items()}


def _unused(sizes: MoeSizes) -> str:
    changed = [name for name, value in _defaults().items() if getattr(sizes, name) != value]
    return (
        f"{', '.join(changed)} say how experts work, but num_experts=0: no layer has any. Use "
        "num_experts=8, say, or a preset without experts."
    )
