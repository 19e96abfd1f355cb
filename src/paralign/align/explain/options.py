"""What the reference's optimizer was told to do with a parameter."""

from __future__ import annotations

from typing import Any

from paralign.align.explain.context import Context


def options_of(context: Context, name: str) -> dict[str, Any]:
    """Return the options of the optimizer group that steps a parameter in the reference."""
    for index in context.reference.reader.ranks:
        for optimizer in index.optimizers:
            for group in optimizer["groups"]:
                if name in group["names"]:
                    return {"class": optimizer["class"], **group["options"]}
    return {}
