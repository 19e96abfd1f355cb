"""DTensors sharded over tp run on their local heads; placements that would be wrong are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from paralign.errors import LayoutError
from paralign.parallel.context import ContextParallel
from paralign.testing import run_on_ranks
from tests.parallel.context_toys import (
    BUDGET,
    NAMES,
    SEQ_LEN,
    Case,
    PlainCore,
    build_mask,
    build_tensors,
    relative_error,
    run,
)

TITLE = "context parallel over axis 'cp' (2 ranks) cannot take these DTensors"


def _sharded_over_tp(ulysses_degree: int | None, mask_kind: str, with_cp: bool) -> dict[str, float]:
    """Run on a (cp, tp) mesh, q, k and v sharded on heads over tp and, if asked, tokens over cp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tensors, mask = build_tensors(Case(cp=2, num_kv_heads=2, value_width=5)), build_mask(mask_kind)
    arguments: dict[str, object] = {} if mask is None else {"mask": mask}
    wanted = run(PlainCore(), tensors, **arguments)
    if with_cp:
        placed = [distribute_tensor(x, mesh, [Shard(2), Shard(1)]) for x in tensors]
    else:
        half = SEQ_LEN // 2
        slices = [x.narrow(2, mesh["cp"].get_local_rank() * half, half) for x in tensors]
        placed = [distribute_tensor(x, mesh["tp"], [Shard(1)]) for x in slices]
    style = ContextParallel(layout="BNSD", ulysses_degree=ulysses_degree, seq_len=SEQ_LEN)
    found = run(style.apply(PlainCore(), mesh["cp"]), placed, **arguments)
    errors = {}
    for name, ours, reference in zip(NAMES, found, wanted, strict=True):
        assert isinstance(ours, DTensor)
        assert ours.placements == placed[0].placements
        local = reference.chunk(2, 2)[mesh["cp"].get_local_rank()]
        errors[name] = relative_error(
            ours.to_local(), local.chunk(2, 1)[mesh["tp"].get_local_rank()]
        )
        if with_cp:
            assert relative_error(ours.full_tensor(), reference) <= BUDGET
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("with_cp", [False, True], ids=["tp_mesh", "cp_tp_mesh"])
@pytest.mark.parametrize(
    ("ulysses_degree", "mask"),
    [(None, "none"), (None, "per_head"), (1, "per_head"), (1, "window"), (None, "additive")],
)
def test_heads_over_tp_equal_one_device(ulysses_degree: int | None, mask: str, with_cp: bool):
    for errors in run_on_ranks(_sharded_over_tp, 4, ulysses_degree, mask, with_cp):
        assert set(errors) == set(NAMES)
        for name, error in errors.items():
            assert error <= BUDGET, f"{name} is off by {error:.1e}"


def _refused() -> list[str]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = both["cp"], both["tp"]
    core = ContextParallel(layout="BNSD").apply(PlainCore(), cp)
    x = torch.ones(1, 4, 8, 4)

    def placed(*placements: Placement, mesh: DeviceMesh = both) -> Tensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    good = placed(Shard(2), Shard(1))
    calls: list[tuple[Tensor, Tensor, Tensor]] = [
        (placed(Partial(), mesh=cp),) * 3,
        (placed(Replicate(), mesh=cp),) * 3,
        (placed(Shard(3), mesh=cp),) * 3,
        (placed(Shard(2), mesh=tp),) * 3,
        (placed(Shard(2), Partial()),) * 3,
        (good, placed(Shard(2), Replicate()), placed(Shard(2), Replicate())),
        (good, good, x),
    ]
    messages = []
    for q, k, v in calls:
        try:
            core(q, k, v)
            messages.append("went through")
        except LayoutError as error:
            messages.append(str(error))
    try:
        core(x, x, x, mask=distribute_tensor(torch.ones(16, 16), tp, [Shard(0)]))
    except LayoutError as error:
        messages.append(str(error))
    return messages


def _for_each(problem: str) -> str:
    return TITLE + ":" + "".join(f"\n  - {name} is {problem}" for name in "qkv")


@pytest.mark.ranks
def test_placements_that_would_be_wrong_are_refused():
    hint = (
        "a Partial here usually means head_dim points at the axis that attention contracts (the "
        "features of a head) instead of the one that counts heads"
    )
    wanted = [
        _for_each(f"Partial(sum) over axis 'cp' (2 ranks): {hint}"),
        _for_each(
            "Replicate() over axis 'cp' (2 ranks): that is the whole sequence on every rank. Feed "
            "each rank its slice: x.redistribute(placements=[Shard(2)]), or split the batch before "
            "the model"
        ),
        _for_each(
            "Shard(dim=3) over axis 'cp' (2 ranks): it must be Shard(2), the dim that counts "
            "tokens (seq_dim)"
        ),
        _for_each(
            "Shard(dim=2) over axis 'tp' (2 ranks): attention on the local piece would be wrong. "
            "Shard it on heads (Shard(1)) or rows, or replicate it"
        ),
        _for_each(f"Partial(sum) over axis 'tp' (2 ranks): reduce it before attention; {hint}"),
        TITLE
        + ":"
        + "".join(
            f"\n  - {name} is placed (Shard(dim=2), Replicate()) on a mesh of axes ('cp', 'tp') "
            "and shape (2, 2) and q is placed (Shard(dim=2), Shard(dim=1)) on a mesh of axes "
            "('cp', 'tp') and shape (2, 2). Place q, k and v alike, so that each rank holds the "
            "K/V heads that belong to its query heads"
            for name in "kv"
        ),
        "q and k are DTensors and the rest of q, k, v is not. Make all of them DTensors or call "
        ".to_local() on those that are.",
        "mask is a DTensor placed (Shard(dim=0),), requires_grad=False; pass the whole mask, "
        "replicated and without a gradient, or as a plain tensor.",
    ]
    for found in run_on_ranks(_refused, 4):
        assert found == wanted
