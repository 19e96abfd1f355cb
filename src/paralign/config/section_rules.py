"""Rules about one section of a config by itself: what its keys say of each other."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.run import FsdpSection, PrecisionSection, TensorSection


def overlap_problems(tensor: TensorSection) -> Iterator[str]:
    """Yield a sentence where chunks of a sequence are asked for that is not cut."""
    if tensor.overlaps and not tensor.sequence_parallel:
        yield (
            f"tensor.overlap={tensor.overlap} gathers and scatters chunks of the sequence, which "
            "is whole on every rank with tensor.sequence_parallel=false. Use overlap: none, or "
            "sequence_parallel: true."
        )


def part_problems(precision: PrecisionSection) -> Iterator[str]:
    """Yield a sentence for every part that is kept wide where everything is."""
    for part in ("softmax", "logits", "residual"):
        if getattr(precision, part) == "float32" and precision.compute != "bfloat16":
            yield (
                f"precision.{part}=float32 has no effect on precision.compute={precision.compute}, "
                f"and no setting is ignored. Remove {part}, or use compute: bfloat16."
            )


def unit_problems(fsdp: FsdpSection) -> Iterator[str]:
    """Yield a sentence for every unit that is empty, and module that is in two."""
    wrap = fsdp.wrap
    if isinstance(wrap, str):
        return
    names = [name for unit in wrap for name in unit]
    if not names or not all(unit for unit in wrap):
        yield (
            f"fsdp.wrap={[list(unit) for unit in wrap]} has a unit without modules. "
            "Name at least one module in each, or use wrap: root."
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"fsdp.wrap names {name!r} {names.count(name)} times, but a module belongs to one "
            "unit. Name it once."
        )
