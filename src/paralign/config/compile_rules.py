"""Rules of the compile section: beside what blocks can be compiled."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.run import RunConfig


def compile_problems(config: RunConfig) -> Iterator[str]:
    """Yield what keeps blocks from being compiled. Units are judged with the model."""
    backend = config.compile.backend
    if backend == "none":
        return
    title = f"compile.backend={backend}"
    if config.program is not None:
        yield (
            f"{title} is for paralign's own parallel code, and program is set. Remove compile, and "
            "compile in your own code."
        )
        return
    if config.mesh.tp > 1:
        yield (
            f"{title} and mesh.tp={config.mesh.tp}: every matrix of a layer is multiplied between "
            "two collectives, which cannot be traced, so that next to nothing would be compiled. "
            "Use compile.backend=none, or tp=1."
        )
    if not isinstance(config.recompute.parts, str):
        yield (
            f"{title} and recompute.parts={list(config.recompute.parts)}: these are calls inside "
            "of a layer, which a graph does not make. Use recompute.parts=block, or none."
        )
    if config.align.record == "activations":
        yield (
            f"{title} and align.record=activations: what modules return inside of a graph is never "
            "seen. Use align.record=gradients, or compile.backend=none."
        )
