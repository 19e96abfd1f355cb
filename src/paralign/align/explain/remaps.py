"""Tell which ranks hold the weights of another layer than their names say, as pairing saw."""

from __future__ import annotations

from paralign.align.explain.context import Context
from paralign.align.places import Remap
from paralign.align.verdict import Finding

WRONG_LAYER = "wrong_layer"
PERMUTED_SHARDS = "permuted_shards"


def explain_remaps(context: Context) -> list[Finding]:
    """Return one finding per layer and set of ranks that is not what it is called."""
    pairing = context.parallel.pairing
    return [] if pairing is None else [_finding(context, remap) for remap in pairing.remaps]


def _finding(context: Context, remap: Remap) -> Finding:
    is_order = remap.holds == remap.expected
    advice = (
        "Cut and place it by the rank's coordinate on the axis that shards it."
        if is_order
        else "Correct the rule that names it (layers of the stages before it, plus its own "
        "number), or leave it out: content tells."
        if remap.is_followed
        else "Derive the layer's number from the stage alone: layers of the stages before it plus "
        "its own number. Ranks of one stage hold the same layers, whatever their other coordinates."
    )
    axes = ["pp"] if not is_order and "pp" in context.mesh.sizes else []
    return Finding(
        component="weights",
        cause=PERMUTED_SHARDS if is_order else WRONG_LAYER,
        tensor=None if is_order or not remap.tensors else remap.tensors[0],
        axes=axes,
        evidence={
            "eps_before": None,
            "eps_after": 0.0,  # bit for bit what the other layer holds
            "share_beyond_2e-3": None,
            "ranks": list(remap.ranks),
            "layer": remap.expected,
            "called": remap.name,
            "holds": remap.holds,
            "tensors": len(remap.tensors),
        },
        fix=f"{str(remap)[0].upper()}{str(remap)[1:]} ({len(remap.tensors)} tensors, bit for bit). "
        f"{advice}",
    )
