"""What every tensor-parallel style is made of: the run's options, the region, local weights.

Between blocks the residual stream is cut along the sequence (sequence parallel) or held whole by
every rank; inside a block every rank has all tokens and a part of the features::

    stream [B, S/n, H]  enter: all-gather          column -> core -> row   leave: reduce-scatter
    stream [B, S, H]    enter: gradients all-reduced         "             leave: all-reduce

Weights are DTensors on the tp axis, so that FSDP shards what tp has left. The work itself is done
on plain local tensors: a module runs its own ``forward`` on its local weights.

Ref:
    Shoeybi et al., "Megatron-LM", 2019. https://arxiv.org/abs/1909.08053
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022
    (sequence parallel). https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from paralign.collectives import (
    all_gather_dim,
    all_reduce_backward,
    all_reduce_forward,
    reduce_scatter_dim,
)
from paralign.errors import ConfigError, LayoutError
from paralign.layout import Part
from paralign.parallel.tensor_overlap import Handoff
from paralign.parallel.tensor_weights import Spread, spread_


@dataclass(frozen=True)
class TensorParallel:
    """How tensor parallelism runs.

    Attributes:
        sequence_parallel: Between blocks, cut the stream along the sequence, so that norms and
            residuals are computed once and activations take one tp-th of the memory. The same
            bytes travel.
        overlap: ``"chunks"``: multiply one chunk of tokens while another one is sent; the same
            results up to the order of sums. Needs ``sequence_parallel``.

    Raises:
        ConfigError: ``overlap`` is something else, or without ``sequence_parallel``.
    """

    sequence_parallel: bool = True
    overlap: Literal["none", "chunks"] = "none"

    def __post_init__(self) -> None:
        if self.overlap not in ("none", "chunks"):
            raise ConfigError(f"overlap={self.overlap!r} must be 'none' or 'chunks'.")
        if self.overlap == "chunks" and not self.sequence_parallel:
            raise ConfigError(
                "overlap='chunks' gathers and scatters chunks of the sequence, which is whole on "
                "every rank with sequence_parallel=False. Use overlap='none' or "
                "sequence_parallel=True."
            )


class Returned(NamedTuple):
    """What a rank of tp returns of a module's output, and what it has of the output's gradient."""

    value: Part
    grad: Part


class TensorStyle(ParallelStyle):
    """Base of the styles of a tensor-parallel plan. Works alone too: :meth:`apply`.

    Args:
        seq_dim: Dim of the residual stream that counts tokens.
    """

    def __init__(self, *, seq_dim: int = 1) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        self.options = TensorParallel()
        self.enters = True  # its input is the stream; False: an outer module has entered already
        self.handoff: Handoff | None = None  # to or from an outer module that enters in chunks

    def configured(
        self, options: TensorParallel, *, enters: bool, handoff: Handoff | None = None
    ) -> TensorStyle:
        """Return the same style with the settings of a run."""
        style = copy.copy(self)
        style.options, style.enters, style.handoff = options, enters, handoff
        return style

    @property
    def in_chunks(self) -> bool:
        """Whether the stream crosses in chunks here."""
        return False

    @property
    def crossing(self) -> str:
        """``enter`` or ``leave`` when the stream does so here; empty: it does not."""
        return ""

    @abstractmethod
    def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
        """Return how each parameter of ``module`` is spread; pure, works on the meta device."""

    def problems(self, module: nn.Module, degree: int) -> list[str]:
        """Return why ``module`` cannot have this style over ``degree`` ranks."""
        return []

    def returned(self, module: nn.Module, degree: int) -> Returned | None:
        """Return which part of its output ``module`` returns on a rank; None: not known here."""
        return None

    @property
    def stream(self) -> Returned:
        """What a rank has of the residual stream."""
        part = Part(dim=self.seq_dim) if self.options.sequence_parallel else Part()
        return Returned(part, part)

    @abstractmethod
    def run(
        self, module: nn.Module, call: Callable[..., Any], region: Region
    ) -> Callable[..., Any]:
        """Return what stands in front of ``call``, the module's own forward."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Spread the parameters of ``module`` over a 1-D mesh, wrap its forward, and return it.

        Parameters that are DTensors already are left as they are.

        Raises:
            LayoutError: The module cannot have this style, or has one already.
        """
        if problems := self.problems(module, device_mesh.size()):
            raise LayoutError.from_problems(f"cannot apply {type(self).__name__}", problems)
        if isinstance(module.forward, TensorForward):
            raise LayoutError(
                f"{type(module).__name__} has a tensor-parallel style already. Apply one only."
            )
        spread_(module, self.spreads(module, device_mesh.size()), device_mesh)
        region = Region(device_mesh, self.options, seq_dim=self.seq_dim)
        forward: Any = TensorForward(self.run(module, module.forward, region))
        module.forward = forward
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


class TensorForward:
    """Stands in for ``module.forward``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part."""
        return self._call(*args, **kwargs)


class Region:
    """The two ends of a tensor-parallel region on one rank.

    Args:
        mesh: The 1-D mesh of the axis.
        options: Settings of the run.
        seq_dim: Dim of the stream that counts tokens.
    """

    def __init__(self, mesh: DeviceMesh, options: TensorParallel, *, seq_dim: int) -> None:
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.degree = mesh.size()
        self._cuts_sequence = options.sequence_parallel
        self.seq_dim = seq_dim

    def enter(self, x: Tensor) -> Tensor:
        """Give every rank all tokens of the stream; gradients of all ranks are summed."""
        if self._cuts_sequence:
            return all_gather_dim(x, dim=self.seq_dim, group=self.group)
        return all_reduce_backward(x, group=self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum what the ranks computed, back into the stream."""
        if self._cuts_sequence:
            return reduce_scatter_dim(x, dim=self.seq_dim, group=self.group)
        return all_reduce_forward(x, group=self.group)
