"""How a pangu_moe decoder is cut into pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from paralign.models.decoder import DecoderBlueprint
from paralign.models.pangu_moe.model import pangu_rotary
from paralign.models.pangu_moe.presets import PanguMoeConfig
from paralign.models.rotary import Rotary

if TYPE_CHECKING:
    from paralign.parallel.tensor_base import TensorStyle


class PanguMoeBlueprint(DecoderBlueprint):
    """The pieces of :class:`paralign.models.pangu_moe.model.PanguMoe`."""

    def __init__(self, config: PanguMoeConfig) -> None:
        super().__init__(
            num_layers=config.num_layers,
            init_std=config.init_std,
            residual_names=("attention.out", "ffn.down", "shared.down", "experts.down"),
            sizes=config,
            has_dropout=config.dropout > 0,
        )
        self._config = config

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotary tables of ``positions``."""
        return pangu_rotary(self._config, positions)

    def tensor_parallel(self) -> dict[str, TensorStyle]:
        """Cut by heads what follows the latents, which are narrow and made from the stream.

        They are gathered instead of the stream, and so is the rotary key, which all heads share.
        """
        from paralign.parallel.tensor_styles import (
            ColumnParallel,
            RowParallel,
            SharedInput,
            TokenWise,
        )

        heads = self._config.num_heads
        return {
            **super().tensor_parallel(),
            "layers.*.attention.q_down": TokenWise(),
            "layers.*.attention.q_norm": TokenWise(),
            "layers.*.attention.q_up": ColumnParallel(num_heads=heads),
            "layers.*.attention.kv_down": TokenWise(),
            "layers.*.attention.kv_norm": TokenWise(),
            "layers.*.attention.kv_up": ColumnParallel(num_heads=heads),
            "layers.*.attention.rotary_key": SharedInput(),
            "layers.*.attention.out": RowParallel(),
        }
