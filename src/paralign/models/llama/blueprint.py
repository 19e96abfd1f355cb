"""How a llama decoder is cut into pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from paralign.models.decoder import DecoderBlueprint
from paralign.models.llama.model import llama_rotary
from paralign.models.llama.presets import LlamaConfig
from paralign.models.rotary import Rotary

if TYPE_CHECKING:
    from paralign.parallel.tensor_base import TensorStyle


class LlamaBlueprint(DecoderBlueprint):
    """The pieces of :class:`paralign.models.llama.model.Llama`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(
            num_layers=config.num_layers,
            init_std=config.init_std,
            residual_names=("attention.wo", "ffn.down", "shared.down", "experts.down"),
            sizes=config,
            has_dropout=config.dropout > 0,
        )
        self._config = config

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotary tables of ``positions``."""
        return llama_rotary(self._config, positions)

    def tensor_parallel(self) -> dict[str, TensorStyle]:
        """Cut attention by heads; key and value heads fewer than ranks are shared by neighbours."""
        from paralign.parallel.tensor_styles import ColumnParallel, RowParallel, SharedInput

        kv_heads = self._config.num_kv_heads
        return {
            **super().tensor_parallel(),
            "layers.*.attention": SharedInput(),
            "layers.*.attention.wq": ColumnParallel(num_heads=self._config.num_heads),
            "layers.*.attention.wk": ColumnParallel(num_heads=kv_heads),
            "layers.*.attention.wv": ColumnParallel(num_heads=kv_heads),
            "layers.*.attention.wo": RowParallel(),
        }
