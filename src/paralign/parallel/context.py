"""Context parallel: attention over a sequence of which each rank holds a slice.

Everything outside attention treats tokens one by one, so only the attention core is wrapped.
Between slices and the core, for an axis of ``cp`` ranks read as ``cp / u`` groups of ``u``
(``ulysses_degree``)::

    u = cp  Ulysses     all-to-all: tokens whole, heads split -> core -> all-to-all back
    u = 1   gather-KV   all-gather of K and V -> core on this rank's queries
    between hybrid      all-to-all in the group, all-gather between groups -> core -> all-to-all
    back

**Feed each rank its slice.** See ``docs/context-parallel.md`` for layouts, costs and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from paralign.errors import LayoutError, MeshError
from paralign.parallel.context_call import CoreSignature
from paralign.parallel.context_forward import ContextForward, Groups
from paralign.parallel.context_rules import (
    SequencePlan,
    inner_degree,
    intervals,
    mode_problems,
    resolve_dims,
)

DEFAULT_AXIS = "cp"  # what a mesh without names is called in messages


class ContextParallel(ParallelStyle):
    """Make an attention core see the whole sequence while each rank holds a slice of it.

    A ``ParallelStyle``: use it in a ``parallelize_module`` plan, or alone with :meth:`apply`. The
    core is any module whose ``forward`` takes 4-D q, k and v and returns a tensor in q's layout.
    Reuse one style for all layers: it creates the groups of a hybrid once per mesh.

    Shapes (BNSD; the same dims in the other layouts), on each rank of ``n``:
        q: ``[B, N, S / n, D]``.
        k: ``[B, N_kv, S / n, D]``.
        v: ``[B, N_kv, S / n, D_v]``.
        mask: global, ``[S, S]`` or ``[B or 1, N or 1, S or 1, S]``; True or 0 where a query may
            attend.
        returns: ``[B, N, S / n, D_v]``.

    Comm (per call; u = ``ulysses_degree``):
        u > 1: forward one all-to-all of q, k and v together (one for each of them if they are
            large) and one of the output; backward the same.
        u < n: forward one all-gather of K and V; backward one reduce-scatter (sum) of dK and dV.

    Exact up to the order of sums: one device and ``n`` ranks differ by rounding; Ulysses with the
    same kernel is usually bitwise equal in the forward.

    Args:
        seq_dim: Dim of q, k and v that counts tokens.
        head_dim: Dim that counts *heads*, not the features of a head.
        layout: ``"BNSD"``, ``"BSND"`` or ``"SBND"`` (or with H for N), instead of the dims.
        ulysses_degree: Ranks that heads are split over; None: all of the axis; 1: none, K and V are
            gathered.
        qkv_indices: Places of q, k and v among the parameters of ``forward``.
        qkv_kwarg_names: Names of q, k and v, instead of places.
        mask_kwarg_name: Name of the mask; None: ``mask``, ``attn_mask`` or ``attention_mask`` if
            the core has one of them.
        load_balance: Rank r holds chunks r and 2n-1-r of the sequence, so that causal attention
            with gathered K and V is the same work on every rank. Split the batch with
            :func:`split_sequence_indices`.
        seq_len: Global sequence length, checked against what each rank is fed; None: not checked.
        guards: False switches the checks off, to watch what goes wrong without them. Experiments
            only.

    Raises:
        LayoutError: The arguments contradict each other or name dims attention cannot use.

    Ref:
        Jacobs et al., "DeepSpeed Ulysses", 2023. https://arxiv.org/abs/2309.14509
        Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.2 (gathered K and V, head-tail
        chunks). https://arxiv.org/abs/2407.21783
    """

    def __init__(
        self,
        seq_dim: int | None = None,
        head_dim: int | None = None,
        layout: str | None = None,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        mask_kwarg_name: str | None = None,
        load_balance: bool = False,
        seq_len: int | None = None,
        *,
        guards: bool = True,
    ) -> None:
        super().__init__()
        dims = resolve_dims(layout, seq_dim, head_dim, guards=guards)
        self._settings = _Settings(
            seq_dim=dims[0],
            head_dim=dims[1],
            ulysses_degree=ulysses_degree,
            qkv_indices=tuple(qkv_indices),
            qkv_kwarg_names=tuple(qkv_kwarg_names),
            mask_kwarg_name=mask_kwarg_name,
            load_balance=load_balance,
            seq_len=seq_len,
            guards=guards,
            positions_proven=False,
        )
        self._groups: list[tuple[DeviceMesh, int | None, bool, Groups]] = []

    def __repr__(self) -> str:
        values = vars(self._settings).items()
        return f"ContextParallel({', '.join(f'{name}={value!r}' for name, value in values)})"

    @property
    def seq_dim(self) -> int:
        """Dim that counts tokens, from the front."""
        return self._settings.seq_dim

    @property
    def head_dim(self) -> int:
        """Dim that counts heads, from the front."""
        return self._settings.head_dim

    def configured(
        self,
        *,
        ulysses_degree: int | None,
        load_balance: bool,
        seq_len: int | None = None,
        positions_proven: bool = False,
    ) -> ContextParallel:
        """Return a style with the same layout and arguments, and the settings of a run.

        Args:
            ulysses_degree: As in the constructor.
            load_balance: As in the constructor.
            seq_len: As in the constructor; None: as this style has it.
            positions_proven: Whoever splits the batch has proven that the ranks hold disjoint
                positions, so no fingerprints are exchanged.
        """
        style = ContextParallel(seq_dim=self.seq_dim, head_dim=self.head_dim, guards=False)
        style._settings = replace(
            self._settings,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            seq_len=self._settings.seq_len if seq_len is None else seq_len,
            positions_proven=positions_proven,
        )
        style._groups = self._groups  # so that a hybrid's groups are made once for all layers
        return style

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Wrap ``module.forward`` for the ranks of a 1-D mesh and return the module.

        Comm:
            Hybrid only: creates the process groups of both parts of the axis the first time, which
            is collective over the mesh's world. Otherwise none.

        Raises:
            MeshError: The mesh is not 1-D, or this rank is not in it.
            LayoutError: The mode does not fit the axis or the core, or the module is wrapped
                already.
        """
        if device_mesh.ndim != 1 or device_mesh.get_coordinate() is None:
            raise MeshError(
                "ContextParallel needs the 1-D mesh of one axis that this rank is in, not one of "
                f"axes {device_mesh.mesh_dim_names} and shape {tuple(device_mesh.shape)}. Pass "
                "mesh['cp']."
            )
        if isinstance(module.forward, ContextForward):
            raise LayoutError(
                f"{type(module).__name__} is wrapped by ContextParallel already; wrapping it again "
                "would exchange slices twice. Call ContextParallel.remove(module) first."
            )
        settings = self._settings
        groups = self._groups_of(device_mesh)
        signature = self.signature_of(module)
        # An instance attribute in front of the class's forward: deleting it restores the module.
        forward: Any = ContextForward(
            module,
            signature=signature,
            groups=groups,
            seq_dim=settings.seq_dim,
            head_dim=settings.head_dim,
            seq_len=settings.seq_len,
            guards=settings.guards,
            positions_proven=settings.positions_proven,
        )
        module.forward = forward
        return module

    def signature_of(self, module: nn.Module) -> CoreSignature:
        """Say which argument of ``module.forward`` is q, k, v, the mask and the causal flag.

        Raises:
            LayoutError: ``forward`` does not have what this style names.
        """
        settings = self._settings
        return CoreSignature(
            module.forward,
            core=type(module).__name__,
            qkv_indices=settings.qkv_indices,
            qkv_kwarg_names=settings.qkv_kwarg_names,
            mask_kwarg_name=settings.mask_kwarg_name,
        )

    @staticmethod
    def remove(module: nn.Module) -> nn.Module:
        """Undo :meth:`apply` and return the module.

        Raises:
            LayoutError: The module is not wrapped.
        """
        if not isinstance(module.forward, ContextForward):
            raise LayoutError(f"{type(module).__name__} is not wrapped by ContextParallel.")
        module.forward.restore()
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def _groups_of(self, mesh: DeviceMesh) -> Groups:
        """Return the plan and the process groups for ``mesh``, made once for each mesh and mode."""
        mode = (self._settings.ulysses_degree, self._settings.load_balance)
        for known, ulysses_degree, load_balance, groups in self._groups:
            if known == mesh and (ulysses_degree, load_balance) == mode:
                return groups
        built = self._build_groups(mesh)
        self._groups.append((mesh, *mode, built))
        return built

    def _build_groups(self, mesh: DeviceMesh) -> Groups:
        settings, degree = self._settings, mesh.size()
        axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else DEFAULT_AXIS
        problems = mode_problems(
            degree=degree,
            ulysses_degree=settings.ulysses_degree,
            load_balance=settings.load_balance,
            axis=axis,
        )
        if problems:
            raise LayoutError.from_problems("cannot apply ContextParallel", problems)
        inner = inner_degree(degree, settings.ulysses_degree)
        plan = SequencePlan(
            degree=degree,
            inner=inner,
            load_balance=settings.load_balance,
            rank=mesh.get_local_rank(),
        )
        exchange, gather = _split_groups(mesh, inner, gathers=settings.ulysses_degree == 1)
        return Groups(
            axis=axis, plan=plan, whole=mesh.get_group(), exchange=exchange, gather=gather
        )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a style was asked for, resolved."""

    seq_dim: int
    head_dim: int
    ulysses_degree: int | None
    qkv_indices: tuple[int, ...]
    qkv_kwarg_names: tuple[str, ...]
    mask_kwarg_name: str | None
    load_balance: bool
    seq_len: int | None
    guards: bool
    positions_proven: bool


def split_sequence_indices(
    seq_len: int, degree: int, rank: int, *, load_balance: bool = False
) -> torch.Tensor:
    """Return the global positions that ``rank`` of ``degree`` holds, in memory order; pure.

    Args:
        seq_len: Global sequence length.
        degree: Ranks of the context-parallel axis.
        rank: This rank's place on it.
        load_balance: Chunks ``rank`` and ``2 * degree - 1 - rank`` of ``2 * degree``, instead of
            one.

    Returns:
        int64 positions ``[seq_len / degree]``: index tokens, shifted labels and positions with it.

    Raises:
        LayoutError: The sequence does not split evenly.
    """
    return torch.cat(
        [torch.arange(*pair) for pair in intervals(seq_len, degree, rank, load_balance)]
    )


def _split_groups(
    mesh: DeviceMesh, inner: int, *, gathers: bool
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of the all-to-all and of the all-gather; None: there is no such step."""
    if gathers:
        return None, mesh.get_group()
    if inner == mesh.size():
        return mesh.get_group(), None
    # torch has no public way to split an axis yet; this is the only place that uses the private
    # one.
    split = mesh._unflatten(0, (mesh.size() // inner, inner), ("cp_gather", "cp_ulysses"))
    return split.get_group("cp_ulysses"), split.get_group("cp_gather")
