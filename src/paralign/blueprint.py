"""How a plain model is cut into pieces: what paralign must know to run it over a mesh.

A model stays a plain ``nn.Module`` that knows nothing of meshes. Its blueprint names the pieces and
says how data flows through them::

    first stage                     every stage                    last stage
    prologue(pieces, batch, ctx)    layer(module, x, ctx)  x n     epilogue(pieces, x, ctx) ->
    logits

``context`` (positions, rotary tables, masks) is computed from the batch on every stage and never
sent between stages. A stage composes these pieces, so a user's own ``forward`` is never cut by
name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paralign.randomness import Init

if TYPE_CHECKING:
    from paralign.parallel.context import ContextParallel
    from paralign.parallel.expert import ExpertParallel
    from paralign.parallel.tensor_base import TensorStyle

# tokens, labels, positions: each [B, S] int64, rows first; see Program.shard. While a step runs,
# num_tokens as well: a scalar on the CPU, what the sum of token losses is divided by; with a model
# that has paralign.Dropout, draws: [B, S] int64, to be passed to it, see dropout.py. Where
# attention must stay inside of documents, documents: [B, S] of whole rows, see documents.py.
Batch = Mapping[str, Tensor]


class Blueprint(ABC):
    """Describe one model family to paralign. Subclass it next to the model.

    Every name is a fully qualified name inside the model. Pieces must not overlap and must cover
    every parameter. A model may share one parameter between two pieces (tied embedding and head).
    """

    prologue_names: tuple[str, ...] = ("embedding",)
    """Modules or parameters that only the first stage owns."""

    layers_name: str = "layers"
    """The ``ModuleList`` of layers that the pipeline splits."""

    epilogue_names: tuple[str, ...] = ("norm", "head")
    """Modules or parameters that only the last stage owns."""

    head_name: str | None = None
    """The module that the epilogue ends with: from ``[B, S_local, D]`` it makes the logits, which
    the epilogue returns as they are. Needed for a loss in chunks."""

    stream_sources: tuple[str, ...] = ()
    """Patterns of the modules whose output starts the residual stream. Needed for a stream in
    another dtype than layers compute in."""

    stream_readers: tuple[str, ...] = ()
    """Patterns of the modules that take the residual stream as their first input: norms. Nothing
    else may compute with it. Needed as ``stream_sources``."""

    takes_documents: bool = False
    """Whether ``context`` and ``forward`` look at ``documents`` of a batch, so that attention stays
    inside of each, with positions of its own. Needed for ``data.packing: isolated``."""

    unused_parameters: tuple[str, ...] = ()
    """Glob patterns of parameters that get no gradient in training."""

    @abstractmethod
    def context(self, batch: Batch, *, seq_len: int) -> Any:
        """Compute what every layer needs besides ``x``; owns no parameter.

        Args:
            batch: This rank's micro-batch: ``tokens`` and ``positions``, each ``[B, S_local]``.
                Positions are global and need not be contiguous. With :attr:`takes_documents` there
                may be ``documents``, ``[B, seq_len]`` on every rank.
            seq_len: Global sequence length, for masks that must be global ``[S, S]``.
        """

    @abstractmethod
    def prologue(self, pieces: nn.Module, batch: Batch, context: Any) -> Tensor:
        """Turn tokens into the first layer's input; ``pieces`` has the prologue as attributes."""

    @abstractmethod
    def layer(self, layer: nn.Module, x: Tensor, context: Any) -> Tensor:
        """Run one layer."""

    @abstractmethod
    def epilogue(self, pieces: nn.Module, x: Tensor, context: Any) -> Tensor:
        """Turn the last layer's output into logits ``[B, S_local, V]``."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model's own ``forward`` on a whole batch; the reference run uses this."""
        logits: Tensor = model(batch["tokens"])
        return logits

    def attention(self) -> dict[str, ContextParallel]:
        """Name the attention core inside a layer, and its tensor layout, for context parallel.

        Returns:
            Module name relative to a layer -> an unconfigured ``ContextParallel(layout=...)``.
            Empty: the model cannot run with cp > 1.
        """
        return {}

    def tensor_parallel(self) -> dict[str, TensorStyle]:
        """Say how each module is spread over the tp axis: styles by name, as in ``decoder.py``.

        Returns:
            Pattern of global module names, such as ``layers.*.attention.wq`` -> its style. Together
            they cover every parameter. Empty: the model cannot run with tp > 1.
        """
        return {}

    def experts(self) -> dict[str, ExpertParallel]:
        """Name the stacks of experts inside a layer, for expert parallel.

        Returns:
            Module name relative to a layer -> ``ExpertParallel()``. A layer may lack it. Empty: the
            model cannot run with ep > 1.
        """
        return {}

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """Say how the parameter called ``name`` starts, when paralign initialises the model.

        The default: norms start at one, biases at zero, everything else normal(0, 0.02).
        """
        if name.endswith("bias"):
            return Init.constant(0.0)
        if len(shape) < 2:
            return Init.constant(1.0)
        return Init.normal(std=0.02)


def matches_name(name: str, pattern: str) -> bool:
    """Whether a pattern of a blueprint means the module ``name``.

    It is compared part by part, so that ``*`` stands for one part of a name, or a piece of one:
    ``layers.*.attention`` is the attention of every layer.
    """
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
