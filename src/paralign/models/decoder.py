"""The part of a blueprint that paralign's own decoders share: same pieces, same flow."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor, nn

from paralign.blueprint import Batch, Blueprint
from paralign.documents import document_mask, positions_inside
from paralign.loss import Predicted, predicted_of
from paralign.models.moe_sizes import MoeSizes
from paralign.models.rotary import Rotary
from paralign.randomness import Init

if TYPE_CHECKING:
    from paralign.parallel.context import ContextParallel
    from paralign.parallel.expert import ExpertParallel
    from paralign.parallel.tensor_base import TensorStyle


class Context(NamedTuple):
    """What a layer needs besides its input.

    Attributes:
        rotary: Of this rank's positions.
        predicted: See :class:`paralign.models.router.Router`.
        mask: Of whole rows, ``[B, 1, S, S]``; None: attention is causal and nothing else.
        draws: Of this rank's tokens, ``[B, S]``, see ``dropout.py``; None outside a training step.
    """

    rotary: Rotary
    predicted: Predicted | None
    mask: Tensor | None = None
    draws: Tensor | None = None


class DecoderBlueprint(Blueprint):
    """Embedding, layers that take rotary tables, norm and head.

    A subclass gives ``rotary``.

    Args:
        num_layers: Layers of the whole model.
        init_std: Standard deviation of initial weights.
        residual_names: Ends of the names of projections that write into the residual stream; theirs
            is smaller by ``sqrt(2 * num_layers)``, so that the stream does not grow with depth.
        sizes: Which layers have experts.
        has_dropout: Whether embedding, attention and feed-forward are followed by a dropout.
    """

    prologue_names: tuple[str, ...] = ("embedding",)
    layers_name = "layers"
    epilogue_names = ("norm", "head")
    head_name = "head"
    takes_documents = True
    stream_sources = ("embedding",)
    stream_readers = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")

    def __init__(
        self,
        *,
        num_layers: int,
        init_std: float,
        residual_names: tuple[str, ...],
        sizes: MoeSizes,
        has_dropout: bool = False,
    ) -> None:
        self._has_dropout = has_dropout
        if has_dropout:
            self.prologue_names = ("embedding", "embedding_dropout")
        self._has_experts = [sizes.is_moe_layer(index) for index in range(num_layers)]
        self._has_shared = sizes.shared_hidden_size > 0
        self._init_std = init_std
        self._residual_std = init_std / math.sqrt(2 * num_layers)
        self._residual_names = residual_names

    @abstractmethod
    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotary tables of ``positions``, each ``[B, S]``."""

    def context(self, batch: Batch, *, seq_len: int) -> Context:
        """Return the tables of this rank's positions; ``seq_len`` does not enter."""
        documents = batch.get("documents")
        positions = positions_inside(batch["positions"], documents)
        return Context(
            self.rotary(positions),
            predicted_of(batch),
            document_mask(documents),
            batch.get("draws"),
        )

    def prologue(self, pieces: nn.Module, batch: Batch, context: Context) -> Tensor:
        """Embed the tokens."""
        x = pieces.get_submodule("embedding")(batch["tokens"])
        if self._has_dropout:
            x = pieces.get_submodule("embedding_dropout")(x, context.draws)
        return cast(Tensor, x)

    def layer(self, layer: nn.Module, x: Tensor, context: Context) -> Tensor:
        """Run one layer."""
        return cast(Tensor, layer(x, *context))

    def epilogue(self, pieces: nn.Module, x: Tensor, context: Context) -> Tensor:
        """Norm and project to logits."""
        norm, head = pieces.get_submodule("norm"), pieces.get_submodule("head")
        return cast(Tensor, head(norm(x)))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model's own ``forward`` with the batch's positions."""
        predicted, documents = predicted_of(batch), batch.get("documents")
        return cast(
            Tensor,
            model(batch["tokens"], batch["positions"], predicted, documents, batch.get("draws")),
        )

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

        The vocabulary is cut in embedding and head.
        """
        from paralign.parallel.tensor_styles import (
            TokenWise,
            VocabularyHead,
            VocabularyParallel,
        )

        return {
            "embedding": VocabularyParallel(),
            "layers.*.attention_norm": TokenWise(),
            "layers.*.ffn_norm": TokenWise(),
            **self._dense(),
            **self._routed(),
            **self._dropouts(),
            "norm": TokenWise(),
            "head": VocabularyHead(),
        }

    def _dropouts(self) -> dict[str, TensorStyle]:
        """Say that dropouts return the stream."""
        from paralign.parallel.tensor_styles import TokenWise

        names = ("embedding_dropout", "layers.*.attention_dropout", "layers.*.ffn_dropout")
        return {name: TokenWise() for name in names} if self._has_dropout else {}

    def _dense(self) -> dict[str, TensorStyle]:
        """Cut gate and up by columns, and down by rows."""
        from paralign.parallel.tensor_styles import ColumnParallel, RowParallel, SharedInput

        layers = [str(i) for i, has_experts in enumerate(self._has_experts) if not has_experts]
        if not layers:
            return {}
        if len(layers) == len(self._has_experts):
            layers = ["*"]
        return {
            **{f"layers.{layer}.ffn": SharedInput() for layer in layers},
            "layers.*.ffn.gate": ColumnParallel(),
            "layers.*.ffn.up": ColumnParallel(),
            "layers.*.ffn.down": RowParallel(),
        }

    def _routed(self) -> dict[str, TensorStyle]:
        """Let router and shared expert see a rank's own tokens only, as the experts must."""
        from paralign.parallel.tensor_styles import TokenWise
        from paralign.parallel.tensor_tokens import OwnTokens

        layers = [str(i) for i, has_experts in enumerate(self._has_experts) if has_experts]
        if not layers:
            return {}
        if len(layers) == len(self._has_experts):
            layers = ["*"]
        shared = {"layers.*.ffn.shared": TokenWise()} if self._has_shared else {}
        return {
            **{f"layers.{layer}.ffn": OwnTokens() for layer in layers},
            "layers.*.ffn.router": TokenWise(),
            **shared,
        }

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """Norms start at one, biases at zero, weights normal."""
        if name.endswith("bias"):
            return Init.constant(0.0)
        if name.endswith("norm.weight"):
            return Init.constant(1.0)
        residual = name.removesuffix(".weight").endswith(self._residual_names)
        return Init.normal(std=self._residual_std if residual else self._init_std)
