"""What context parallelism sends in a step: counted from the calls of attention cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paralign.all_to_all import travel_together
from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.mesh import Axis
from paralign.parallel.context import ContextParallel
from paralign.parallel.context_rules import inner_degree, kv_repeats
from paralign.parallel.support import Plan
from paralign.prove.traffic import Traffic, sent


@dataclass(frozen=True, kw_only=True)
class Core:
    """One call of an attention core, on one micro-batch and slice of the sequence."""

    query_bytes: int
    kv_bytes: int
    output_bytes: int
    num_kv_heads: int


class CoreWatch:
    """Sees the calls of the attention cores of one layer on the meta device.

    Args:
        layer: A layer; all are taken to be like it.
        blueprint: Where its cores are.
    """

    def __init__(self, layer: nn.Module, blueprint: Blueprint) -> None:
        self.calls: list[Core] = []
        for name, style in blueprint.attention().items():
            watch = partial(self._watch, style)
            layer.get_submodule(name).register_forward_pre_hook(watch, with_kwargs=True)

    def _watch(
        self, style: ContextParallel, core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        q, k, v = style.signature_of(core).read(args, kwargs).qkv
        output = q.new_empty((*q.shape[:-1], v.shape[-1]))
        self.calls.append(
            Core(
                query_bytes=q.nbytes,
                kv_bytes=k.nbytes + v.nbytes,
                output_bytes=output.nbytes,
                num_kv_heads=k.shape[style.head_dim],
            )
        )


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
