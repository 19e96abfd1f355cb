"""Notes the calls of attention cores, on the meta device too: what they cost is in the shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paralign.blueprint import Blueprint
from paralign.parallel.context import ContextParallel


@dataclass(frozen=True, kw_only=True)
class Core:
    """One call of an attention core, on one micro-batch and slice of the sequence.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        score_width: Features of a query, over which its product with a key sums.
        value_width: Features of a value.
        query_bytes: Of all queries.
        kv_bytes: Of all keys and values.
        output_bytes: Of what the core returns.
    """

    num_heads: int
    num_kv_heads: int
    score_width: int
    value_width: int
    query_bytes: int
    kv_bytes: int
    output_bytes: int


class CoreWatch:
    """Notes every call of the attention cores of some layers.

    Args:
        layers: The layers.
        blueprint: Where their cores are.
    """

    def __init__(self, layers: Iterable[nn.Module], blueprint: Blueprint) -> None:
        self.calls: list[Core] = []
        self._hooks = [
            layer.get_submodule(name).register_forward_pre_hook(
                partial(self._note, style), with_kwargs=True
            )
            for layer in layers
            for name, style in blueprint.attention().items()
        ]

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def _note(
        self, style: ContextParallel, core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        q, k, v = style.signature_of(core).read(args, kwargs).qkv
        output = q.new_empty((*q.shape[:-1], v.shape[-1]))
        self.calls.append(
            Core(
                num_heads=q.shape[style.head_dim],
                num_kv_heads=k.shape[style.head_dim],
                score_width=q.shape[-1],
                value_width=v.shape[-1],
                query_bytes=q.nbytes,
                kv_bytes=k.nbytes + v.nbytes,
                output_bytes=output.nbytes,
            )
        )
