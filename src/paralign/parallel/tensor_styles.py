"""The styles of a tensor-parallel plan: a module's part of the weights, and what is sent around it.

See ``tensor_base.py`` for the region they share, and ``docs/tensor-parallel.md`` for a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paralign.errors import LayoutError
from paralign.layout import Part
from paralign.local_weights import local_of, local_parameters
from paralign.parallel.tensor_base import Region, Returned, TensorStyle
from paralign.parallel.tensor_overlap import gathered_linears, scattered_linear
from paralign.parallel.tensor_weights import Spread


class TokenWise(TensorStyle):
    """A module that treats each token of the stream alone, with whole weights on every rank: norms.

    Comm:
        none. With sequence parallel a rank's gradients are those of its own tokens, a partial sum
        over tp; without it every rank computes the same, and they are whole.
    """

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """All parameters below the module, replicated."""
        spread = Spread(dim=None, is_partial=self.options.sequence_parallel)
        return {name: spread for name, _ in module.named_parameters()}

    def returned(self, module: nn.Module, degree: int) -> Returned:
        """Its part of the stream."""
        return self.stream

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Run on local weights."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module):
                return call(*args, **kwargs)

        return forward


class SharedInput(TensorStyle):
    """A module whose first argument is the stream and feeds several column-parallel linears.

    The stream is gathered once for all of them; linears inside take it as it is. A module without
    parameters of its own that only hands its input on makes a shared tensor enter by itself.

    Comm:
        with sequence parallel: one all-gather forward, one reduce-scatter backward; without: one
        all-reduce backward.
    """

    @property
    def crossing(self) -> str:
        """The stream enters."""
        return "enter"

    @property
    def in_chunks(self) -> bool:
        """Whether linears inside work on chunks."""
        return self.handoff is not None

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """None: what is inside has styles of its own."""
        return {}

    def returned(self, module: nn.Module, degree: int) -> Returned | None:
        """All tokens, where it hands its input on to uses that differ between ranks."""
        has_parts = next(module.children(), None) is not None
        return None if has_parts else Returned(Part(), Part(is_sum=True))

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Let the first argument enter."""
        name, handoff = type(module).__name__, self.handoff

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                raise LayoutError(
                    f"SharedInput needs the stream as the first positional argument of {name}, "
                    f"which was called with {len(args)} of them. Pass it by position."
                )
            if handoff is None or not handoff.weights:
                return call(region.enter(args[0]), *args[1:], **kwargs)
            x = handoff.gather(args[0], dim=region.seq_dim, group=region.group)
            try:
                return call(x, *args[1:], **kwargs)
            finally:
                handoff.clear()

        return forward


class ColumnParallel(TensorStyle):
    """An ``nn.Linear`` of which each rank computes a part of the output features.

    Shapes (n ranks): weight ``[out / n, in]``, bias ``[out / n]``; maps all tokens ``[B, S, in]``
    to ``[B, S, out / n]``.

    Comm:
        none inside a :class:`SharedInput`; else what that does.

    Args:
        num_heads: The output features are those of so many heads. With fewer heads than ranks,
            ``n / num_heads`` neighbouring ranks compute the same head, each for its own query
            heads: the weight is replicated, a rank uses the rows of its head, and the gradient is a
            partial sum.
        seq_dim: Dim of the stream that counts tokens.
    """

    def __init__(self, *, num_heads: int | None = None, seq_dim: int = 1) -> None:
        super().__init__(seq_dim=seq_dim)
        self.num_heads = num_heads

    @property
    def crossing(self) -> str:
        """The stream enters, unless it has further out."""
        return "enter" if self.enters else ""

    @property
    def in_chunks(self) -> bool:
        """Whether it multiplies one chunk while another is gathered."""
        return self.options.overlap == "chunks"

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """Rows of weight and bias; whole where heads are shared."""
        spread = Spread(dim=None, is_partial=True) if self._shares(degree) else Spread(dim=0)
        return {name: spread for name, _ in module.named_parameters(recurse=False)}

    def problems(self, module: nn.Module, degree: int) -> list[str]:
        """It must be a linear layer whose heads, or features, divide."""
        if not isinstance(module, nn.Linear):
            return _not_a(module, nn.Linear)
        heads = self.num_heads
        if heads is None:
            return _uneven("out_features", module.out_features, degree)
        if module.out_features % heads:
            return [f"out_features={module.out_features} are not those of num_heads={heads}"]
        if heads % degree and degree % heads:
            return [
                f"num_heads={heads} and axis 'tp' ({degree} ranks): one must be a multiple of the "
                "other"
            ]
        return []

    def returned(self, module: nn.Module, degree: int) -> Returned | None:
        """Some features; those of a shared head on all ranks that share it."""
        if not self._shares(degree):
            return Returned(Part(dim=-1), Part(dim=-1))
        head = Part(dim=-1, num_parts=self.num_heads)
        return Returned(head, replace(head, is_sum=True))

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Compute this rank's output features."""
        rows = self._rows(module, region) if self._shares(region.degree) else None

        def whole(x: Tensor) -> Any:
            with local_parameters(module, rows=rows):
                return self._output(call(region.enter(x) if self.enters else x), region)

        return self._run_in_chunks(module, whole, rows, region) if self.in_chunks else whole

    def _run_in_chunks(
        self,
        module: nn.Module,
        whole: Callable[..., Any],
        rows: tuple[int, int] | None,
        region: Region,
    ) -> Callable[..., Any]:
        """Take the product from the outer module that has made it, or make it while gathering."""

        def seen(leaf: str) -> Tensor | None:
            parameter = module._parameters[leaf]
            if parameter is None or getattr(parameter, "device_mesh", region.mesh).ndim > 1:
                return None  # FSDP has not gathered it yet
            local = local_of(parameter)
            return local if rows is None else local.narrow(0, *rows)

        number = -1
        if self.handoff is not None:
            number = self.handoff.register(lambda: seen("weight"))

        def forward(x: Tensor) -> Any:
            if self.enters:
                weight = seen("weight")
                assert weight is not None  # FSDP gathers it before forward
                _, [out] = gathered_linears(x, [weight], dim=region.seq_dim, group=region.group)
            elif self.handoff is None or (made := self.handoff.take(number, x)) is None:
                return whole(x)
            else:
                out = made
            bias = seen("bias")
            return self._output(out if bias is None else out + bias, region)

        return forward

    def _output(self, x: Tensor, region: Region) -> Tensor:
        return x

    def _shares(self, degree: int) -> bool:
        return self.num_heads is not None and self.num_heads < degree

    def _rows(self, module: nn.Module, region: Region) -> tuple[int, int]:
        """Where the rows of this rank's head start, and how many they are."""
        assert isinstance(module, nn.Linear) and self.num_heads is not None
        head = region.rank // (region.degree // self.num_heads)
        width = module.out_features // self.num_heads
        return head * width, width


class VocabularyHead(ColumnParallel):
    """The linear layer that makes logits: each rank those of its part of the vocabulary.

    Returns a DTensor ``[B, S, V]``, sharded on the vocabulary, whose loss is computed without
    gathering it; see :func:`paralign.loss.token_cross_entropy_sum`.
    """

    def __init__(self, *, seq_dim: int = 1) -> None:
        super().__init__(seq_dim=seq_dim)

    def returned(self, module: nn.Module, degree: int) -> Returned | None:
        """None: a DTensor says it itself."""
        return None

    def _output(self, x: Tensor, region: Region) -> Tensor:
        return DTensor.from_local(x, region.mesh, [Shard(x.ndim - 1)], run_check=False)


class RowParallel(TensorStyle):
    """An ``nn.Linear`` of which each rank multiplies a part of the input features.

    Shapes (n ranks): weight ``[out, in / n]``, bias ``[out]``; maps ``[B, S, in / n]`` to the
    stream. The bias is added once, after the sum.

    Comm:
        with sequence parallel: one reduce-scatter forward, one all-gather backward; without: one
        all-reduce forward.
    """

    @property
    def crossing(self) -> str:
        """What it computes leaves into the stream."""
        return "leave"

    @property
    def in_chunks(self) -> bool:
        """Whether it multiplies one chunk while another's sums are scattered."""
        return self.options.overlap == "chunks"

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """Columns of the weight; the bias acts on the stream."""
        spreads = {"weight": Spread(dim=1)}
        if getattr(module, "bias", None) is not None:
            spreads["bias"] = Spread(dim=None, is_partial=self.options.sequence_parallel)
        return spreads

    def problems(self, module: nn.Module, degree: int) -> list[str]:
        """It must be a linear layer whose input features divide."""
        if not isinstance(module, nn.Linear):
            return _not_a(module, nn.Linear)
        return _uneven("in_features", module.in_features, degree)

    def returned(self, module: nn.Module, degree: int) -> Returned:
        """Its part of the stream."""
        return self.stream

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Multiply, sum over ranks, add the bias."""

        def forward(x: Tensor) -> Tensor:
            bias, weight = module._parameters["bias"], module._parameters["weight"]
            if self.in_chunks and weight is not None:
                out = scattered_linear(x, local_of(weight), dim=region.seq_dim, group=region.group)
            else:
                with local_parameters(module, without="bias"):
                    out = region.leave(call(x))
            return out if bias is None else out + local_of(bias)

        return forward


class VocabularyParallel(TensorStyle):
    """An ``nn.Embedding`` of which each rank holds the rows of a part of the vocabulary.

    Shapes (n ranks): weight ``[V / n, H]``; maps all tokens ``[B, S]`` to the stream.

    Comm:
        as :class:`RowParallel`. Exact: all but one of the terms are zero.
    """

    @property
    def crossing(self) -> str:
        """What it looks up leaves into the stream."""
        return "leave"

    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """Rows."""
        return {"weight": Spread(dim=0)}

    def problems(self, module: nn.Module, degree: int) -> list[str]:
        """It must be a plain embedding whose rows divide."""
        if not isinstance(module, nn.Embedding):
            return _not_a(module, nn.Embedding)
        used = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        # By identity: padding_idx=0 equals False.
        given = [
            f"{name}={value!r}"
            for name in used
            if (value := getattr(module, name)) is not None and value is not False
        ]
        extra = [f"{', '.join(given)} would act on a part of the rows. Leave it out"]
        extra = extra if given else []
        return extra + _uneven("num_embeddings", module.num_embeddings, degree)

    def returned(self, module: nn.Module, degree: int) -> Returned:
        """Its part of the stream."""
        return self.stream

    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Look up this rank's tokens; the others' rows come from the others."""
        assert isinstance(module, nn.Embedding)
        size = module.num_embeddings // region.degree
        first = region.rank * size

        def forward(tokens: Tensor) -> Tensor:
            is_elsewhere = (tokens < first) | (tokens >= first + size)
            with local_parameters(module):
                found = call((tokens - first).masked_fill(is_elsewhere, 0))
            return region.leave(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))

        return forward


def _not_a(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [f"it is for nn.{kind.__name__}, not {type(module).__name__}"]


def _uneven(name: str, value: int, degree: int) -> list[str]:
    if value % degree == 0:
        return []
    return [
        f"{name}={value} does not split evenly over axis 'tp' ({degree} ranks, remainder "
        f"{value % degree})"
    ]
