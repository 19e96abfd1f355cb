"""Which part of every module's output a rank of tp has: what a plan says to whoever records a run.

Outputs are plain local tensors, so nothing but the plan knows whether one is some features, a slice
of the sequence or the whole. A module without a style returns the stream if a part of it leaves a
region, as a block does; an attention core returns some heads. Of anything else nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paralign.layout import Part
from paralign.parallel.tensor import TensorPlan, styles_of
from paralign.parallel.tensor_base import Returned, TensorParallel


def returned_of(
    stage: nn.Module,
    plan: TensorPlan,
    *,
    degree: int,
    options: TensorParallel,
    head_dims: Mapping[str, int],
) -> dict[str, Returned]:
    """Return by module name what a rank has of the outputs that are one tensor, and of gradients.

    Args:
        stage: A stage, or a whole model.
        plan: The tensor-parallel plan.
        degree: Ranks of tp.
        options: Settings of the run.
        head_dims: Attention cores by name -> the dim of their output that counts heads.
    """
    styles = dict(styles_of(stage, plan, options))
    found: dict[str, Returned] = {}
    for name, style in styles.items():
        returned = style.returned(stage.get_submodule(name), degree)
        if returned is not None:
            found[name] = returned
    leaving = [name for name, style in styles.items() if style.crossing == "leave"]
    for name, _ in stage.named_modules():
        inside = next((other for other in leaving if other.startswith(f"{name}.")), None)
        if name and name not in found and inside is not None:
            found[name] = styles[inside].stream
    heads = {name: Part(dim=dim) for name, dim in head_dims.items()}
    return found | {name: Returned(part, part) for name, part in heads.items()}
