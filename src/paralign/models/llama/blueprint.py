"""How a llama decoder is cut into pieces."""

from __future__ import annotations

from paralign.blueprint import Batch
from paralign.models.decoder import DecoderBlueprint
from paralign.models.llama.model import llama_rotary
from paralign.models.llama.presets import LlamaConfig
from paralign.models.rotary import Rotary


class LlamaBlueprint(DecoderBlueprint):
    """The pieces of :class:`paralign.models.llama.model.Llama`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(
            num_layers=config.num_layers,
            init_std=config.init_std,
            residual_names=("attention.wo", "ffn.down"),
        )
        self._config = config

    def context(self, batch: Batch, *, seq_len: int) -> Rotary:
        """Return the rotary tables of this rank's positions; ``seq_len`` does not enter."""
        return llama_rotary(self._config, batch["positions"])
