"""What tensor parallelism sends in one step; counted on the meta device, not measured.

The skeleton that is run is the whole model on a rank's part of the stream, so an activation of it
has as many tokens as the rank's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paralign.config.run import RunConfig
from paralign.mesh import Axis
from paralign.parallel.loss_chunks import chunk_bounds
from paralign.parallel.support import Plan
from paralign.parallel.tensor import TensorPlan, styles_of
from paralign.parallel.tensor_base import TensorParallel, TensorStyle
from paralign.parallel.tensor_overlap import NUM_CHUNKS
from paralign.prove.traffic import BYTES, Traffic, all_reduced, sent


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The stream on its way into or out of one module, on one micro-batch.

    Attributes:
        module: Global name.
        kind: ``enter``, ``leave`` or ``split``: into the ranks' own tokens, and joined again.
        num_bytes: What this rank holds of the stream there.
        num_tokens: Tokens of a row in that.
        in_chunks: Whether linears work on chunks of it.
    """

    module: str
    kind: str
    num_bytes: int
    num_tokens: int
    in_chunks: bool

    def calls(self, num_pieces: int) -> int:
        """Return the collectives each way when the stream comes in so many pieces."""
        if not self.in_chunks:
            return num_pieces
        pieces = chunk_bounds(self.num_tokens, num_pieces)
        return sum(min(NUM_CHUNKS, stop - start) for start, stop in pieces)


class StreamWatch:
    """Notes every crossing of a forward pass of ``skeleton``."""

    def __init__(self, skeleton: nn.Module, plan: TensorPlan, options: TensorParallel) -> None:
        self.cuts_sequence = options.sequence_parallel
        self.crossings: list[Crossing] = []
        for name, style in styles_of(skeleton, plan, options):
            module = skeleton.get_submodule(name)
            if style.crossing in ("enter", "split"):
                module.register_forward_pre_hook(self._entering(name, style))
            elif style.crossing == "leave":
                module.register_forward_hook(self._leaving(name, style))

    def of(self, pieces: Sequence[str]) -> Iterator[Crossing]:
        """Yield the crossings in and below the modules called ``pieces``."""
        for crossing in self.crossings:
            if any(f"{crossing.module}.".startswith(f"{piece}.") for piece in pieces):
                yield crossing

    def _entering(self, name: str, style: TensorStyle) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.crossings.append(_crossing(name, style, args[0]))

        return note

    def _leaving(self, name: str, style: TensorStyle) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.crossings.append(_crossing(name, style, output))

        return note


def _crossing(name: str, style: TensorStyle, x: Tensor) -> Crossing:
    return Crossing(
        module=name,
        kind=style.crossing,
        num_bytes=x.nbytes,
        num_tokens=x.shape[style.seq_dim],
        in_chunks=style.in_chunks,
    )


def tensor_traffic(
    pieces: Sequence[str],
    stream: StreamWatch,
    *,
    config: RunConfig,
    plan: Plan,
    head: str | None,
    has_loss: bool,
) -> Iterator[Traffic]:
    """Yield every crossing of the stream, forward and backward, and the loss of a cut vocabulary.

    Args:
        pieces: Global names of what a pipeline rank has of the model.
        stream: What a forward pass of the skeleton showed.
        config: The run.
        plan: The resolved plan.
        head: The module whose output the loss is computed of in chunks; None: there are no chunks.
        has_loss: Whether the pipeline rank computes the loss.
    """
    tp, m = config.mesh.tp, plan.num_microbatches
    if tp == 1:
        return
    everything = list(stream.of(pieces))
    crossings = [crossing for crossing in everything if crossing.kind != "split"]
    split = [crossing for crossing in everything if crossing.kind == "split"]
    # What comes out is joined, and so is the gradient of what went in.
    yield Traffic(
        what="tokens of experts",
        collective="all-gather",
        axis=str(Axis.TP),
        calls=2 * m * len(split),
        num_bytes=2 * m * sum(sent(crossing.num_bytes, tp) for crossing in split),
    )
    held = sum(crossing.num_bytes for crossing in crossings)
    at_head = sum(crossing.num_bytes for crossing in crossings if crossing.module == head)
    chunks, again = plan.loss_chunks, plan.loss_recomputations
    calls = sum(crossing.calls(chunks if crossing.module == head else 1) for crossing in crossings)
    calls_at_head = sum(c.calls(chunks) for c in crossings if c.module == head)
    # Zero-bubble kinds do not compute every chunk of the loss again twice.
    at_most = again > 1
    if stream.cuts_sequence:
        # One way gathers, the other way, backward or forward, scatters sums.
        yield Traffic(
            what="stream",
            collective="all-gather",
            axis=str(Axis.TP),
            calls=m * (calls + again * calls_at_head),
            num_bytes=m * sent((held + again * at_head) * tp, tp),
            at_most=at_most and at_head > 0,
        )
        yield Traffic(
            what="stream",
            collective="reduce-scatter",
            axis=str(Axis.TP),
            calls=m * calls,
            num_bytes=m * sent(held * tp, tp),
        )
    else:
        yield Traffic(
            what="stream",
            collective="all-reduce",
            axis=str(Axis.TP),
            calls=m * calls,
            num_bytes=m * all_reduced(held, tp),
        )
    if has_loss:
        degrees = config.mesh.degrees
        tokens = config.batch.global_batch // degrees.dp // m * config.batch.seq_len // degrees.cp
        # Two calls: the largest logit; the sum of exponentials, the label's logit, who has it.
        yield Traffic(
            what="cross entropy",
            collective="all-reduce",
            axis=str(Axis.TP),
            calls=2 * m * chunks * (1 + again),
            num_bytes=m
            * (1 + again)
            * all_reduced(4 * tokens * max(4, BYTES[plan.compute_dtype]), tp),
            at_most=at_most,
        )
