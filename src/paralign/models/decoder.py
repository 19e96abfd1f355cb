"""The part of a blueprint that paralign's own decoders share: same pieces, same flow."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor, nn

from paralign.blueprint import Batch, Blueprint
from paralign.loss import Predicted, predicted_of
from paralign.models.rotary import Rotary
from paralign.randomness import Init

if TYPE_CHECKING:
    from paralign.parallel.context import ContextParallel
    from paralign.parallel.expert import ExpertParallel
    from paralign.parallel.tensor_base import TensorStyle


class Context(NamedTuple):
    """What a layer needs besides its input; see :class:`paralign.models.router.Router`."""

    rotary: Rotary
    predicted: Predicted | None


class DecoderBlueprint(Blueprint):
    """Embedding, layers that take rotary tables, norm and head.

    A subclass gives ``rotary``.

    Args:
        num_layers: Layers of the whole model.
        init_std: Standard deviation of initial weights.
        residual_names: Ends of the names of projections that write into the residual stream; theirs
            is smaller by ``sqrt(2 * num_layers)``, so that the stream does not grow with depth.
    """

    prologue_names = ("embedding",)
    layers_name = "layers"
    epilogue_names = ("norm", "head")
    head_name = "head"
    stream_sources = ("embedding",)
    stream_readers = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")

    def __init__(
        self, *, num_layers: int, init_std: float, residual_names: tuple[str, ...]
    ) -> None:
        self._init_std = init_std
        self._residual_std = init_std / math.sqrt(2 * num_layers)
        self._residual_names = residual_names

    @abstractmethod
    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotary tables of ``positions``, each ``[B, S]``."""

    def context(self, batch: Batch, *, seq_len: int) -> Context:
        """Return the tables of this rank's positions; ``seq_len`` does not enter."""
        return Context(self.rotary(batch["positions"]), predicted_of(batch))

    def prologue(self, pieces: nn.Module, batch: Batch, context: Context) -> Tensor:
        """Embed the tokens."""
        return cast(Tensor, pieces.get_submodule("embedding")(batch["tokens"]))

    def layer(self, layer: nn.Module, x: Tensor, context: Context) -> Tensor:
        """Run one layer."""
        return cast(Tensor, layer(x, *context))

    def epilogue(self, pieces: nn.Module, x: Tensor, context: Context) -> Tensor:
        """Norm and project to logits."""
        norm, head = pieces.get_submodule("norm"), pieces.get_submodule("head")
        return cast(Tensor, head(norm(x)))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model's own ``forward`` with the batch's positions."""
        return cast(Tensor, model(batch["tokens"], batch["positions"], predicted_of(batch)))

    def attention(self) -> dict[str, ContextParallel]:
        """Name the attention core and its layout."""
        from paralign.parallel.context import ContextParallel

        return {"attention.core": ContextParallel(layout="BNSD", mask_kwarg_name="mask")}

    def experts(self) -> dict[str, ExpertParallel]:
        """Name the experts of the layers that have them."""
        from paralign.parallel.expert import ExpertParallel

        return {"ffn.experts": ExpertParallel()}

    def tensor_parallel(self) -> dict[str, TensorStyle]:
        """Spread everything but attention, which a subclass adds.

        The vocabulary is cut in embedding and head; gate and up by columns and down by rows.
        """
        from paralign.parallel.tensor_styles import (
            ColumnParallel,
            RowParallel,
            SharedInput,
            TokenWise,
            VocabularyHead,
            VocabularyParallel,
        )

        return {
            "embedding": VocabularyParallel(),
            "layers.*.attention_norm": TokenWise(),
            "layers.*.ffn_norm": TokenWise(),
            "layers.*.ffn": SharedInput(),
            "layers.*.ffn.gate": ColumnParallel(),
            "layers.*.ffn.up": ColumnParallel(),
            "layers.*.ffn.down": RowParallel(),
            "norm": TokenWise(),
            "head": VocabularyHead(),
        }

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """Norms start at one, biases at zero, weights normal."""
        if name.endswith("bias"):
            return Init.constant(0.0)
        if name.endswith("norm.weight"):
            return Init.constant(1.0)
        residual = name.removesuffix(".weight").endswith(self._residual_names)
        return Init.normal(std=self._residual_std if residual else self._init_std)
