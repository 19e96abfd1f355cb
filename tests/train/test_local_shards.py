from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from paralign.errors import LayoutError
from paralign.testing import run_on_ranks
from paralign.train.local_shards import is_elementwise, on_local_shards

ATEN = torch.ops.aten


def test_what_is_elementwise():
    for func in (
        ATEN.mul_.Tensor,
        ATEN.add.Tensor,
        ATEN._foreach_addcdiv_.ScalarList,
        ATEN._foreach_sqrt.default,
        ATEN._foreach_zero_.default,
        ATEN._fused_adamw_.default,
        ATEN.zeros_like.default,
    ):
        assert is_elementwise(func), func
    for func in (
        ATEN.sum.default,
        ATEN.mm.default,
        ATEN._foreach_norm.Scalar,
        ATEN._foreach_max.default,
        ATEN.normal_.default,
        ATEN.bernoulli_.float,
        ATEN.cumsum.default,
        ATEN.sort.default,
        ATEN.view.default,
    ):
        assert not is_elementwise(func), func


def _parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(0)
    placements = [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(0))]
    made = []
    for placement in placements:
        # Seven rows over two ranks: uneven shards.
        whole = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        made.append(nn.Parameter(distribute_tensor(whole, mesh, placement)))
        whole = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        made[-1].grad = distribute_tensor(whole, mesh, placement)
    return made


def _step(name: str, is_local: bool, options: dict[str, Any]) -> list[tuple[Tensor, int]]:
    parameters = _parameters()
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)
    for _ in range(3):
        if is_local:
            with on_local_shards():
                optimizer.step()
        else:
            optimizer.step()
    states = [state for one in optimizer.state.values() for state in one.values()]
    assert all(isinstance(s, DTensor) or s is None or s.dim() == 0 for s in states)
    return [(cast(DTensor, p.detach()).full_tensor(), p._version) for p in parameters]


def _both(name: str, local: dict[str, Any], plain: dict[str, Any]) -> tuple[Any, Any]:
    return _step(name, True, local), _step(name, False, plain)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"foreach": False}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("Adagrad", {"foreach": False}),
    ],
    ids=str,
)
def test_optimizers_do_what_they_do_on_dtensors(name, options):
    plain = {key: value for key, value in options.items() if key not in ("fused", "foreach")}
    for ours, theirs in run_on_ranks(_both, 4, name, options, plain | {"foreach": False}):
        for (value, version), (expected, _) in zip(ours, theirs, strict=True):
            error = float((value - expected).norm() / expected.norm())
            assert error <= 1e-15
            assert version > 0  # so that a step that routers did not follow is noticed


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(4, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    partial = DTensor.from_local(whole, mesh, [Partial()])
    cases = [
        lambda: rows.sum(),
        lambda: rows @ rows,
        lambda: torch._foreach_norm([rows]),
        lambda: rows.normal_(),
        lambda: rows + columns,
        lambda: rows + torch.ones(4, 4),
        lambda: partial.sqrt(),
        lambda: torch._foreach_add_([rows, rows], [rows, columns]),
    ]
    texts = []
    for case in cases:
        try:
            with on_local_shards():
                case()
        except LayoutError as error:
            texts.append(str(error))
        else:
            texts.append("")
    # Nothing has changed, and plain tensors work.
    assert torch.equal(rows.full_tensor(), whole)
    with on_local_shards():
        assert float((torch.ones(3) @ torch.ones(3)).sqrt()) == pytest.approx(3**0.5)
        doubled = rows * 2
        into = torch.empty_like(rows)
        assert torch.add(rows, rows, out=into) is into
    assert isinstance(into, DTensor)
    assert torch.equal(into.full_tensor(), 2 * whole)
    assert torch.equal(rows.full_tensor(), whole)
    assert isinstance(doubled, DTensor)
    assert doubled.placements == rows.placements
    return texts


@pytest.mark.ranks
def test_what_depends_on_the_layout_is_refused():
    for texts in run_on_ranks(_refusals, 2):
        assert all("inside on_local_shards" in text for text in texts), texts
        assert [t for t in texts if "how tensors are cut" in t] == texts[:4]
        assert [t for t in texts if "not cut alike" in t] == [*texts[4:6], texts[7]]
        assert "partial sums" in texts[6]
