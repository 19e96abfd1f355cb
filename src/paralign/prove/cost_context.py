"""What context parallelism sends in a step: counted from the calls of attention cores."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.all_to_all import travel_together
from paralign.config.run import RunConfig
from paralign.mesh import Axis
from paralign.parallel.context_cores import CoreWatch
from paralign.parallel.context_rules import inner_degree, kv_repeats
from paralign.parallel.support import Plan
from paralign.prove.traffic import Traffic, sent


def context_traffic(
    cores: CoreWatch, *, config: RunConfig, plan: Plan, num_layers: int, stream_parts: int
) -> Iterator[Traffic]:
    """Yield what a pipeline rank sends over cp.

    Args:
        cores: Has seen one micro-batch of a layer.
        config: The run.
        plan: The resolved plan.
        num_layers: Layers of the rank.
        stream_parts: Parts that tp cuts the sequence between layers into.
    """
    cp, tp = config.mesh.cp, config.mesh.tp
    times = plan.num_microbatches * num_layers
    inner = inner_degree(cp, config.context.ulysses_degree)
    outer = cp // inner
    for core in cores.calls:
        # The skeleton's core has all heads of a rank's stream; a rank's has the heads that tp has
        # left, of all tokens that it shares with the others of tp.
        heads = max(1, core.num_kv_heads // tp)
        kv_bytes = core.kv_bytes // core.num_kv_heads * heads * stream_parts
        # Heads of k and v are repeated until they split over the ranks that heads are split over.
        kv_bytes *= kv_repeats(heads, inner)
        query_bytes, output_bytes = (
            n * stream_parts // tp for n in (core.query_bytes, core.output_bytes)
        )
        num_bytes = query_bytes + kv_bytes
        yield Traffic(
            what="q, k, v, output",
            collective="all-to-all",
            axis=str(Axis.CP),
            calls=2 * times * (2 if travel_together(num_bytes) else 4),
            num_bytes=2 * times * sent(num_bytes + output_bytes, inner),
        )
        gathered = kv_bytes * outer
        for what, collective in (("keys, values", "all-gather"), ("their grads", "reduce-scatter")):
            yield Traffic(
                what=what,
                collective=collective,
                axis=str(Axis.CP),
                calls=times,
                num_bytes=times * sent(gathered, outer),
            )
