"""Explain a comparison that failed, one cause after the other in causal order.

Facts and inputs come first, then weights, module outputs, the loss, gradients, their norm, and what
the optimizer did. What a cause that was found already explains is not reported again: a later
number that is off is a finding of its own only if a hypothesis holds for it by itself, because then
its proof does not rest on anything before it.
"""

from __future__ import annotations

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.clip import explain_clipping
from paralign.align.explain.context import Context
from paralign.align.explain.data import explain_data
from paralign.align.explain.expert_parts import explain_balance
from paralign.align.explain.gradients import explain_gradients
from paralign.align.explain.inputs import explain_inputs
from paralign.align.explain.losses import explain_loss, explain_tokens
from paralign.align.explain.norms import WRONG_NORM, explain_norm
from paralign.align.explain.optimizer import explain_optimizer
from paralign.align.explain.output_grads import explain_output_grads
from paralign.align.explain.outputs import explain_outputs
from paralign.align.explain.placement import PERMUTED_SHARDS
from paralign.align.explain.remaps import WRONG_LAYER, explain_remaps
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.explain.router_biases import explain_router_biases
from paralign.align.explain.seed import from_the_loss
from paralign.align.explain.shared import one_factor
from paralign.align.explain.stale import STALE
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
        norms = explain_norm(context, step)
        context.found += norms
        clipping = explain_clipping(context, step)
        context.found += clipping
        _join_norms(context, norms, clipping)
        context.found += explain_router_biases(context, step) or explain_optimizer(context, step)
        if len(context.found) > begin:
            if step > min(context.steps):
                _carried_over(context, context.found[begin:], step)
            break  # later steps follow from this one
    found = context.found[len(context.facts) :]
    for finding in found:
        _locate(context, finding)
    return found


def _join_norms(context: Context, norms: list[Finding], clipping: list[Finding]) -> None:
    """Leave out a wrong norm of unknown making where clipping shows between which ranks it is."""
    placed = any(finding.cause == WRONG_NORM and finding.axes for finding in clipping)
    for finding in norms:
        if placed and finding.cause == WRONG_NORM and not finding.axes:
            context.found.remove(finding)


def _carried_over(context: Context, findings: list[Finding], step: int) -> None:
    """Say of what nothing explains that the step before left something else behind.

    All of that step was right, up to the parameters after it, so what was carried over is suspect.
    No corrected tensor shows it, so it is a candidate and the cause stays unknown. Ranks whose own
    tokens are right have not left it behind.
    """
    for finding in findings:
        computed = finding.component in ("forward", "backward", "optimizer")
        if computed and finding.cause == "unknown":
            finding.axes = finding.axes or _axes_of_what_is_off(context, finding, step)
            finding.candidates = [
                str(Candidate("state", STALE, tuple(finding.axes))),
                str(Candidate(finding.component, "unknown", tuple(finding.axes))),
            ]
            finding.separate_by = f"record the parameters and optimizer state before step {step}"
            finding.fix = (
                f"Everything up to the parameters after step {step - 1} is right, and step {step} "
                f"is not, first {finding.tensor}. Look at what is kept between steps: values put "
                "in place, or not cleared (gradients, gathered or offloaded copies, moments)."
            )


def _loss_and_gradients(context: Context, step: int) -> list[Finding]:
    """A loss that no number explains by itself is explained by the gradients, if they are."""
    losses = explain_loss(context, step)
    if not context.upstream:
        balance = explain_balance(context, step, losses)
        if balance is not None:
            return balance
    gradients = explain_gradients(context, Kind.GRAD, step)
    if not context.upstream and not losses:
        gradients = _from_outputs(context, step, gradients)
    # A loss that balances experts besides is no multiple of the reference's as a whole.
    if not context.upstream and all(finding.cause == "unknown" for finding in losses):
        gradients = from_the_loss(context, step, gradients)
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


def _from_outputs(context: Context, step: int, gradients: list[Finding]) -> list[Finding]:
    """Let gradients of module outputs speak where those of parameters do not say what is wrong.

    Slices in another order are so already in the output whose gradient it is: there the axes are
    those of the exchange, and not of the shards that a parameter is kept in.
    """
    known = [finding.cause for finding in gradients if finding.cause != "unknown"]
    if known and known[0] != PERMUTED_SHARDS:
        return gradients
    outputs = explain_output_grads(context, step)
    if known and [finding.cause for finding in outputs] != [PERMUTED_SHARDS]:
        return gradients
    return outputs or gradients


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


def _axes_of_what_is_off(context: Context, finding: Finding, step: int) -> list[str]:
    """Return the axes that tell ranks whose part is off from those whose part is right."""
    for item in context.failing(Kind.OUTPUT, step):
        if item.row.label == finding.tensor:
            holders = {piece.rank for held in item.side.replicas.values() for piece in held}
            return context.mesh.named(
                context.mesh.coordinates_that_tell(item.row.ranks_off, sorted(holders))
            )
    return []


def _locate(context: Context, finding: Finding) -> None:
    """Add the module that owns the tensor, and where its class is defined."""
    scalar = finding.tensor in _SCALARS and finding.component in _SCALARS[finding.tensor]
    if finding.where is None and finding.tensor and not scalar:
        name = finding.tensor.split(" [")[0]
        owner = context.owners.get(name)
        finding.where = None if owner is None else dict(owner)
