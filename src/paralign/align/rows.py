"""Say what was measured of a tensor as a row of the report."""

from __future__ import annotations

from paralign.align.measure import Measured
from paralign.align.quantity import Moment
from paralign.align.verdict import TensorRow


def tensor_row(
    moment: Moment,
    name: str,
    measured: Measured,
    category: str,
    tolerance: float | None,
    eps: float,
) -> TensorRow:
    """Make the row, with the ranks whose own part is out of budget if the tensor is.

    Args:
        moment: When and what.
        name: The reference's name of the tensor.
        measured: How far it is off.
        category: The class of tensors whose rule is applied.
        tolerance: Its relative budget; None: it is listed, not gated.
        eps: What errors are counted in.
    """
    total = measured.total
    relative = total.relative
    row = TensorRow(
        kind=moment.kind,
        name=name,
        step=moment.step,
        rel_l2=relative,
        eps=relative / eps,
        budget_eps=None if tolerance is None else tolerance / eps,
        cosine=total.cosine,
        scale=total.scale,
        worst_index=total.worst_index,
        ok=tolerance is None or relative <= tolerance,
        state=moment.state or None,
        category=category,
        worst_values=total.worst_values,
        share_beyond=total.beyond / total.elements if total.elements else 0.0,
    )
    if not row.ok and tolerance is not None:
        limit = tolerance * total.base
        row.ranks_off = [
            rank
            for rank, part in sorted(measured.by_rank.items())
            if part.nonfinite or not part.error <= limit
        ]
    return row
