"""How a pangu_moe decoder is cut into pieces."""

from __future__ import annotations

from paralign.blueprint import Batch
from paralign.models.decoder import DecoderBlueprint
from paralign.models.pangu_moe.model import pangu_rotary
from paralign.models.pangu_moe.presets import PanguMoeConfig
from paralign.models.rotary import Rotary


class PanguMoeBlueprint(DecoderBlueprint):
    """The pieces of :class:`paralign.models.pangu_moe.model.PanguMoe`."""

    def __init__(self, config: PanguMoeConfig) -> None:
        super().__init__(
            num_layers=config.num_layers,
            init_std=config.init_std,
            residual_names=("attention.out", "ffn.down"),
        )
        self._config = config

    def context(self, batch: Batch, *, seq_len: int) -> Rotary:
        """Return the rotary tables of this rank's positions; ``seq_len`` does not enter."""
        return pangu_rotary(self._config, batch["positions"])
