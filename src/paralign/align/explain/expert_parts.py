"""Hypotheses about the output of experts: which tokens are off says what became of their choices.

The router's choices are recorded, and every token's are known. Where router and tokens are right
and the experts' output is not, it is off for the tokens

- that chose an expert of another rank: nothing was combined over the axis that cuts the experts;
- that chose certain experts, always: these got no tokens;
- that came after so many others to the same expert: it had no room;
- all, though each has something: they were added up with other weights, which the experts'
  parameters prove, or met other experts than those they chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paralign.align.explain.applied_weights import prove_applied_weights
from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.own_parts import all_of, experts_of_ranks
from paralign.align.explain.placement import PERMUTED_SHARDS
from paralign.align.explain.proof import Proof, evidence, limit_of
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding
from paralign.layout import boxes

CHOICES = "[0]"
WEIGHTS = "[1]"
_SAME_TOTAL = 1e-6  # float32 weights that add up to one, or to the routed scaling
_OTHER_TOTAL = 1e-3
_WHOLE = ("int64", "int32", "int16", "int8", "uint8")


class Tokens(NamedTuple):
    """What one rank's micro-batch holds: per token its choices, whether it is off, and is zero."""

    rank: int
    choices: Tensor
    is_off: Tensor
    is_zero: Tensor


def prove_experts(context: Context, item: Compared) -> Proof | None:
    """Return what became of tokens' choices, if ``item`` is the output of experts."""
    router = router_beside(context, item)
    limit = limit_of(item)
    if router is None or not router.row.ok or limit is None or len(item.base.shape) != 3:
        return None
    choices = all_of(router.base).long()
    seen = list(_seen(item, choices, limit))
    if not any(bool(tokens.is_off.any()) for tokens in seen):
        return None
    own = experts_of_ranks(context, item.row.name)
    for hypothesis in (_not_combined, _lost_experts, _no_room):
        proof = hypothesis(seen, own)
        if proof is not None:
            return proof
    weights = _weights_beside(context, router)
    applied = None if weights is None else prove_applied_weights(context, item, router, weights)
    return applied or _met_others(seen, own)


def router_beside(context: Context, item: Compared) -> Compared | None:
    """Return the choices of the router in the same module, which returns a tuple."""
    around = item.row.name.rpartition(".")[0]
    for other in context.judged(Kind.OUTPUT, item.moment.step):
        name = other.row.name
        beside = name.endswith(CHOICES) and name.rpartition(".")[0] == around
        if beside and other.base.shape[:2] == item.base.shape[:2] and around:
            return other
    return None


def _weights_beside(context: Context, router: Compared) -> Compared | None:
    """Return the weights of a router's choices, if they are right."""
    name = router.row.name.removesuffix(CHOICES) + WEIGHTS
    for other in context.judged(Kind.OUTPUT, router.moment.step):
        if other.row.name == name:
            return other if other.row.ok else None
    return None


def _seen(item: Compared, choices: Tensor, limit: float) -> Iterator[Tokens]:
    typical = item.measured.total.base / math.sqrt(max(choices.shape[0] * choices.shape[1], 1))
    for pieces in item.side.replicas.values():
        for piece in pieces:
            for box in boxes(piece.map):
                x, r = piece.read(box), item.base.fetch(box)
                (row, at), (rows, length) = box.start[:2], box.shape[:2]
                own = choices[row : row + rows, at : at + length].flatten(0, 1)
                error = torch.linalg.vector_norm(x - r, dim=-1).flatten()
                size = torch.linalg.vector_norm(r, dim=-1).flatten()
                is_off = ~(error <= limit * size.clamp_min(typical))
                yield Tokens(piece.rank, own, is_off, (x == 0).all(-1).flatten())


def _not_combined(seen: list[Tokens], own: dict[int, tuple[int, int]]) -> Proof | None:
    if not own:
        return None
    for tokens in seen:
        first, stop = own.get(tokens.rank, (0, 0))
        is_elsewhere = (tokens.choices < first) | (tokens.choices >= stop)
        if not torch.equal(tokens.is_off, is_elsewhere.any(-1)):
            return None
        if not bool(tokens.is_zero[is_elsewhere.all(-1)].all()):
            return None
    return Proof(
        MISSING_REDUCTION,
        math.nan,
        ("ep",),
        detail=_counts(seen),
        text="Tokens are off exactly where they chose an expert of another rank along ep, and "
        "zero where they chose no other: each rank's experts add their own, and nothing is "
        "combined over ep. Send every token's rows back, and add them up.",
    )


def _lost_experts(seen: list[Tokens], own: dict[int, tuple[int, int]]) -> Proof | None:
    del own
    right = {e for tokens in seen for e in tokens.choices[~tokens.is_off].flatten().tolist()}
    chosen = {e for tokens in seen for e in tokens.choices.flatten().tolist()}
    lost = sorted(chosen - right)
    wrong = torch.tensor(lost)
    if not right or not lost or len(lost) > len(chosen) // 2:
        return None
    for tokens in seen:
        has_lost = torch.isin(tokens.choices, wrong).any(-1)
        if not torch.equal(has_lost, tokens.is_off):
            return None
    shown = ", ".join(map(str, lost))
    return _guess(
        MISSING_CONTRIBUTION,
        (),
        _counts(seen) | {"experts": lost},
        f"Tokens are off exactly where they chose expert {shown}, and right elsewhere: it adds "
        "nothing, or something else than it should. Compare what is sent to it.",
        "the expert itself computes something else",
    )


def _no_room(seen: list[Tokens], own: dict[int, tuple[int, int]]) -> Proof | None:
    """Test whether an expert takes the first tokens of a micro-batch only, up to some number."""
    del own
    experts = 1 + max(int(tokens.choices.max()) for tokens in seen)
    places = []
    for tokens in seen:
        flat = tokens.choices.flatten()
        is_chosen = flat.unsqueeze(1) == torch.arange(experts)
        place = is_chosen.long().cumsum(0).gather(1, flat.unsqueeze(1))
        places.append(place.view_as(tokens.choices))
    for room in range(1, max(int(place.max()) for place in places)):
        if all(
            torch.equal((place > room).any(-1), tokens.is_off)
            for place, tokens in zip(places, seen, strict=True)
        ):
            return Proof(
                MISSING_CONTRIBUTION,
                math.nan,
                detail=_counts(seen) | {"capacity": room},
                text=f"Tokens are off exactly where {room} tokens of their micro-batch had chosen "
                "the same expert before them: it has no room for more, and they are dropped. "
                "Dispatch without a capacity, or give both runs the same.",
            )
    return None


def _met_others(seen: list[Tokens], own: dict[int, tuple[int, int]]) -> Proof | None:
    if not own or not all(bool(tokens.is_off.all()) for tokens in seen):
        return None
    if any(bool(tokens.is_zero.any()) for tokens in seen):
        return None
    return _guess(
        PERMUTED_SHARDS,
        ("ep",),
        _counts(seen),
        "Every token is off, though router and tokens are right and none is without experts: "
        "tokens meet other experts than they chose. Compare the order of ranks along ep in "
        "the exchange, and the numbers that experts have on their rank.",
        "the experts compute something else",
    )


def _guess(
    cause: str,
    axes: tuple[str, ...],
    detail: dict[str, object],
    text: str,
    otherwise: str,
) -> Proof:
    run = f"with {' x '.join(axes)} of size 1" if axes else "with experts that are all alike"
    return Proof(
        cause,
        math.nan,
        axes,
        detail=detail,
        text=text,
        candidates=(
            str(Candidate("forward", cause, axes, "what was chosen is not what was met")),
            str(Candidate("forward", "unknown", (), otherwise)),
        ),
        separate_by=f"run again {run}: what is sent wrongly is right then",
    )


def _counts(seen: list[Tokens]) -> dict[str, object]:
    return {
        "tokens_off": sum(int(tokens.is_off.sum()) for tokens in seen),
        "tokens": sum(len(tokens.is_off) for tokens in seen),
    }


def prove_other_choices(context: Context, step: int) -> Finding | None:
    """Return the finding that a router chooses another number of experts than the reference's."""
    sizes: list[dict[str, int]] = []
    for trace in (context.reference.reader, context.trace):
        sizes.append(
            {
                entry.name: entry.shape[-1]
                for index in trace.ranks
                for entry in index.tensors
                if entry.kind == Kind.OUTPUT
                and entry.step == step
                and entry.name.endswith(CHOICES)
                and entry.dtype in _WHOLE
                and len(entry.shape) > 1
            }
        )
    due, made = sizes
    differ = [name for name in due if name in made and made[name] != due[name]]
    if not differ:
        return None
    name = differ[0]
    module = name.removesuffix(CHOICES)
    return Finding(
        component="forward",
        cause="different_config",
        tensor=module,
        evidence={
            "eps_before": None,
            "eps_after": None,  # no tensor was corrected: there are so many or there are not
            "share_beyond_2e-3": None,
            "chosen": made[name],
            "due": due[name],
            "step": step,
            "names": differ,
        },
        fix=f"{module} returns {made[name]} choices a token, and {due[name]} in the reference: it "
        "was built with another config, or the config was changed since by whoever shares it.",
    )


def prove_other_weights(context: Context, item: Compared) -> Proof | None:
    """Return the proof that a router's weights add up to one number in the reference alone.

    Nothing was corrected: without the scores of all experts there is nothing to make them from.
    """
    name = item.row.name
    chosen = {o.row.name: o for o in context.judged(Kind.OUTPUT, item.moment.step)}
    beside = chosen.get(name.removesuffix(WEIGHTS) + CHOICES)
    if not name.endswith(WEIGHTS) or beside is None or not beside.row.ok:
        return None
    due = all_of(item.base).sum(-1)
    total = float(due.mean())
    if not float((due - total).abs().max()) <= _SAME_TOTAL * abs(total):
        return None
    low, high = math.inf, -math.inf
    for pieces in item.side.replicas.values():
        for piece in pieces:
            for box in boxes(piece.map):
                made = piece.read(box).sum(-1)
                low, high = min(low, float(made.min())), max(high, float(made.max()))
    if not high - low > _OTHER_TOTAL * abs(total):
        return None
    return Proof(
        "different_config",
        math.nan,
        key=("different_config", "weights of experts"),
        detail={"due": total, "least": low, "largest": high},
        text=f"The weights of a token's experts add up to {total:.6g} in the reference, and here "
        f"to {low:.6g} to {high:.6g}: they are normalised in another way, or not at all.",
    )


def explain_balance(context: Context, step: int, losses: Sequence[Finding]) -> list[Finding] | None:
    """Return one finding where what is off is the loss that balances experts.

    Everything up to the logits is right, and so are the gradients of what a router returns. The
    gradient of its weight is not: something else than the choices' use adds to it.
    """
    if any(finding.cause != "unknown" for finding in losses):
        return None
    if context.failing(Kind.OUTPUT, step) or not context.failing(Kind.OUTPUT_GRAD, step):
        return None
    routers = [
        item.row.name.removesuffix(CHOICES)
        for item in context.judged(Kind.OUTPUT, step)
        if item.row.name.endswith(CHOICES)
    ]
    grads = {item.row.name: item for item in context.judged(Kind.GRAD, step)}
    outer = {item.row.name: item for item in context.judged(Kind.OUTPUT_GRAD, step)}
    for router in routers[::-1]:  # the last one is the first that the backward pass comes to
        weights = outer.get(f"{router}{WEIGHTS}")
        own = [item for name, item in grads.items() if name.startswith(f"{router}.")]
        if weights is None or not own:
            return None
        if weights.tolerance is None or _is_late(context, step, weights):
            return None
        wrong = [item for item in own if not item.row.ok]
        if wrong:
            return [_balance(context, wrong[0], router)]
    return None


def _is_late(context: Context, step: int, item: Compared) -> bool:
    """Whether the backward pass was wrong before it came to this gradient of an output."""
    for other in context.judged(Kind.OUTPUT_GRAD, step):
        if not other.row.ok:
            return True
        if other is item:
            return False
    return True


def _balance(context: Context, item: Compared, router: str) -> Finding:
    split = tuple(axis for axis in context.mesh.live if axis.startswith(("cp", "sp")))
    listed = [Candidate("loss", "different_config", (), "another coefficient, or none")]
    if split:
        told = "counted in a slice of the sequence"
        listed.insert(0, Candidate("loss", MISSING_REDUCTION, split, told))
    over = " x ".join(split)
    separate = f"run again with {over} of size 1: a slice is the sequence then" if split else None
    return Finding(
        component="loss",
        cause=listed[0].cause,
        tensor=item.row.label,
        axes=list(listed[0].axes),
        evidence={**evidence(item, None), "router": router, "step": item.moment.step},
        fix=f"All outputs are right, and so are the gradients of what {router} returns, but not "
        "that of its weight: the loss that balances experts differs. It is equal on every mesh if "
        "choices are counted over whole sequences, once, and padding is left out.",
        candidates=list(map(str, listed)) if split else [],
        separate_by=separate,
    )
