"""Say in words where in a tensor its error sits, from its profile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ENOUGH = 0.99
"""Share of the squared error that a range must hold to be named."""
_NARROW = 0.75
"""A range longer than this share of its dim says nothing."""


def places(profile: Mapping[str, Any]) -> list[str]:
    """Return one phrase per dim whose error sits in a part of it, and one for ranks.

    Such as ``rows 32-63 of 64 hold 99 % of the error``. Empty where it is spread over everything.
    """
    return [*_dims(profile["dims"]), *_ranks(profile["ranks"])]


def dim_name(dim: int, num_dims: int) -> str:
    """Return what people call a dim: rows and columns of a matrix, else its number."""
    if num_dims == 1:
        return "elements"
    return ("rows", "columns")[dim] if num_dims == 2 else f"dim {dim}"


def narrowest(errors: Sequence[float], share: float = _ENOUGH) -> tuple[int, int] | None:
    """Return the shortest run of bins with ``share`` of the squared error; None if there is none.

    A NaN bin counts as all of the error.
    """
    if any(math.isnan(error) for error in errors):
        squares = [1.0 if math.isnan(error) else 0.0 for error in errors]
    else:
        largest = max(errors, default=0.0)
        if largest == 0.0 or math.isinf(largest):
            return None
        squares = [(error / largest) ** 2 for error in errors]
    wanted, held, first = share * sum(squares), 0.0, 0
    best: tuple[int, int] | None = None
    for last, square in enumerate(squares):
        held += square
        while held - squares[first] >= wanted:
            held -= squares[first]
            first += 1
        if held >= wanted and (best is None or last + 1 - first < best[1] - best[0]):
            best = first, last + 1
    return best


def _dims(dims: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, dim in enumerate(dims):
        run = narrowest(dim["error"])
        if run is None:
            continue
        stops = [*dim["starts"][1:], dim["size"]]
        start, stop = dim["starts"][run[0]], stops[run[1] - 1]
        if stop - start > _NARROW * dim["size"]:
            continue
        where = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
        verb = "holds" if stop - start == 1 else "hold"
        name = dim_name(number, len(dims))
        if stop - start == 1 and name.endswith("s"):
            name = name[:-1]
        yield f"{name} {where} of {dim['size']} {verb} {_amount(dim['error'])}"


def _amount(errors: Sequence[float]) -> str:
    if any(math.isnan(error) for error in errors):
        return "all that is no number"
    return f"{_ENOUGH:.0%} of the error"


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(ranks) < 2:
        return
    worst = max((item["error"] for item in ranks), key=_as_size)
    limit = 1e-2 * _as_size(worst)
    guilty = [item["rank"] for item in ranks if _as_size(item["error"]) > limit]
    if 0 < len(guilty) <= _NARROW * len(ranks):
        few = ", ".join(map(str, guilty[:8]))
        more = ", ..." if len(guilty) > 8 else ""
        yield f"only {len(guilty)} of the {len(ranks)} ranks that hold it: {few}{more}"


def _as_size(error: float) -> float:
    return 1e300 if not math.isfinite(error) else error
