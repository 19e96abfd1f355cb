"""Explain a comparison that failed, one cause after the other in causal order.

Facts and inputs come first, then weights, module outputs, the loss, gradients, their norm, and what
the optimizer did. What a cause that was found already explains is not reported again: a later
number that is off is a finding of its own only if a hypothesis holds for it by itself, because then
its proof does not rest on anything before it.
"""

from __future__ import annotations

from paralign.align.explain.clip import explain_clipping
from paralign.align.explain.context import Context
from paralign.align.explain.data import explain_data
from paralign.align.explain.gradients import explain_gradients
from paralign.align.explain.inputs import explain_inputs
from paralign.align.explain.losses import explain_loss, explain_tokens
from paralign.align.explain.norms import explain_norm
from paralign.align.explain.optimizer import explain_optimizer
from paralign.align.explain.outputs import explain_outputs
from paralign.align.explain.remaps import WRONG_LAYER, explain_remaps
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.explain.shared import one_factor
from paralign.align.explain.weights import explain_weights
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

# A module may be called "norm" as well: these findings are about the number of that name.
_SCALARS = {"tokens": ("data",), "loss": ("loss",), "norm": ("clipping",)}


def explain(context: Context) -> list[Finding]:
    """Return the causes of what is out of budget, in causal order.

    Args:
        context: The comparison; its ``facts`` are taken as found already.
    """
    context.found = list(context.facts)
    for step in context.steps:
        begin = len(context.found)
        remaps = explain_remaps(context) if step == min(context.steps) else []
        weights = explain_weights(context, step)
        if remaps:  # the same layers, and what their names say of every rank
            weights = [finding for finding in weights if finding.cause != WRONG_LAYER]
        context.found += [*remaps, *weights]
        context.found += explain_data(context, step) or explain_inputs(context, step)
        context.found += explain_tokens(context, step)
        context.found += explain_outputs(context, step)
        context.found += _loss_and_gradients(context, step)
        context.found += explain_norm(context, step)
        context.found += explain_clipping(context, step)
        context.found += explain_optimizer(context, step)
        if len(context.found) > begin:
            break  # later steps follow from this one
    found = context.found[len(context.facts) :]
    for finding in found:
        _locate(context, finding)
    return found


def _loss_and_gradients(context: Context, step: int) -> list[Finding]:
    """A loss that no number explains by itself is explained by the gradients, if they are."""
    losses = explain_loss(context, step)
    gradients = explain_gradients(context, Kind.GRAD, step)
    joined = one_factor(losses, gradients)
    if joined is not None:
        return joined
    losses_known = any(finding.cause != "unknown" for finding in losses)
    if losses_known or not any(finding.cause != "unknown" for finding in gradients):
        # What a proven loss does not explain of the gradients may still follow from it.
        gradients = [finding for finding in gradients if not losses or finding.cause != "unknown"]
    else:
        losses = [finding for finding in losses if finding.cause != "unknown"]
    return losses + _not_from_forward(context, gradients)


def _not_from_forward(context: Context, gradients: list[Finding]) -> list[Finding]:
    """Leave out replicas that differ along axes over which a module's outputs differ already."""
    forward = {
        axis
        for finding in context.found
        if (finding.component, finding.cause) == ("forward", MISSING_REDUCTION)
        for axis in finding.axes
    }
    return [
        finding
        for finding in gradients
        if finding.cause != MISSING_REDUCTION or not finding.axes or set(finding.axes) - forward
    ]


def _locate(context: Context, finding: Finding) -> None:
    """Add the module that owns the tensor, and where its class is defined."""
    scalar = finding.tensor in _SCALARS and finding.component in _SCALARS[finding.tensor]
    if finding.where is None and finding.tensor and not scalar:
        name = finding.tensor.split(" [")[0]
        owner = context.owners.get(name)
        finding.where = None if owner is None else dict(owner)
