"""Which part of every module's output a rank of tp has: what a plan says to whoever records a run.

Outputs are plain local tensors, so nothing but the plan knows whether one is some features, a slice
of the sequence or the whole. A module without a style returns the stream if a part of it leaves a
region, as a block does; an attention core returns some heads; experts return a rank's own tokens.
Of anything else nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from paralign.layout import Part
from paralign.parallel.tensor import TensorPlan, styles_of
from paralign.parallel.tensor_base import Returned, TensorParallel
from paralign.parallel.tensor_styles import TokenWise


def returned_of(
    stage: nn.Module,
    plan: TensorPlan,
    *,
    degree: int,
    options: TensorParallel,
    head_dims: Mapping[str, int],
    experts: Sequence[str] = (),
) -> dict[str, Returned]:
    """Return by module name what a rank has of the outputs, and of their gradients.

    ``name[*]`` is said of every tensor of a module that returns several, as a router does.

    Args:
        stage: A stage, or a whole model.
        plan: The tensor-parallel plan.
        degree: Ranks of tp.
        options: Settings of the run.
        head_dims: Attention cores by name -> the dim of their output that counts heads.
        experts: Stacks of experts.
    """
    styles = dict(styles_of(stage, plan, options))
    found: dict[str, Returned] = {}
    for name, style in styles.items():
        returned = style.returned(stage.get_submodule(name), degree)
        if returned is not None:
            found[name] = returned
        if returned is not None and isinstance(style, TokenWise):
            found[f"{name}[*]"] = returned
    leaving = [name for name, style in styles.items() if style.crossing == "leave"]
    for name, _ in stage.named_modules():
        inside = next((other for other in leaving if other.startswith(f"{name}.")), None)
        if name and name not in found and inside is not None:
            found[name] = styles[inside].stream
    # Experts are called with a rank's own tokens: what it has with sequence parallel.
    own = TokenWise().configured(
        replace(options, sequence_parallel=True), enters=False, handoff=None
    )
    found |= {name: own.stream for name in experts}
    heads = {name: Part(dim=dim) for name, dim in head_dims.items()}
    return found | {name: Returned(part, part) for name, part in heads.items()}
