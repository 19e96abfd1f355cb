"""Tell which ranks hold the weights of another layer than their names say, as pairing saw."""

from __future__ import annotations

from paralign.align.explain.context import Context
from paralign.align.places import Remap
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

WRONG_LAYER = "wrong_layer"
PERMUTED_SHARDS = "permuted_shards"


def explain_remaps(context: Context) -> list[Finding]:
    """Return one finding per layer and set of ranks that is not what it is called."""
    pairing = context.parallel.pairing
    if pairing is None:
        return []
    wrong = sorted({rank for remap in pairing.remaps for rank in remap.ranks})
    told = context.mesh.coordinates_that_tell(wrong, range(context.mesh.world_size))
    found: dict[tuple[object, ...], Finding] = {}
    for remap in pairing.remaps:
        finding = _finding(context, remap, ["pp"] if "pp" in told else [])
        # Shards in another order concern many tensors alike; layers are told one by one.
        is_order = finding.cause == PERMUTED_SHARDS
        key = (is_order, *remap.ranks) if is_order else (remap.ranks, remap.name, remap.holds)
        first = found.setdefault(key, finding)
        if first is not finding:
            first.evidence["tensors"] += finding.evidence["tensors"]
    return list(found.values())


def _cutting_axes(context: Context, name: str) -> list[str]:
    """Return the axes along which the ranks hold different parts of a parameter."""
    holders: dict[object, int] = {}
    for index in context.trace.ranks:
        for entry in index.tensors:
            if entry.kind == Kind.PARAM and entry.name == name:
                holders.setdefault((entry.map, entry.flat), index.rank)
    return context.mesh.named(context.mesh.axes_of(list(holders.values())))


def _mixed_up_axes(context: Context, remap: Remap) -> list[str]:
    """Return the axes along which ranks are away from those whose parts they hold."""
    name, pairing = remap.tensors[0], context.parallel.pairing
    held = {
        index.rank: entry
        for index in context.trace.ranks
        for entry in index.tensors
        if entry.kind == Kind.PARAM and entry.name == name
    }
    axes: set[str] = set()
    for rank in remap.ranks:
        places = pairing.places(rank, held[rank]) if pairing and rank in held else None
        owners = [peer for peer in held if places and held[peer].map == places[0].map]
        ways = sorted((context.mesh.axes_of((rank, owner)) for owner in owners), key=len)
        axes |= set(ways[0]) if ways else set()
    between = context.mesh.named([axis for axis in context.mesh.live if axis in axes])
    return between or _cutting_axes(context, name)


def _finding(context: Context, remap: Remap, axes: list[str]) -> Finding:
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
    if is_order:
        # They hold each other's parts, so they were mixed up along what they differ in.
        axes = _mixed_up_axes(context, remap) if remap.tensors else []
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
