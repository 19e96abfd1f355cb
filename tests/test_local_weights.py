from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paralign.local_weights import distribute, local_of, local_parameters
from paralign.testing import run_on_ranks


def test_weights_are_put_back_when_a_module_raises():
    linear = nn.Linear(2, 2)
    weight = linear.weight
    with pytest.raises(ZeroDivisionError), local_parameters(linear, rows=(1, 1), without="bias"):
        assert linear.weight.shape == (1, 2)
        assert linear.bias is None
        raise ZeroDivisionError
    assert linear.weight is weight and linear.bias is not None


def _distributed() -> list[tuple[bool, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    whole = nn.Parameter(torch.arange(24.0).view(4, 6), requires_grad=False)
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]
    found: list[tuple[bool, ...]] = []
    for placement in placements:
        made = distribute(whole, placement, mesh)
        assert isinstance(made, DTensor)
        local = local_of(made)
        full: Tensor = made.full_tensor()
        shares_memory = local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        found.append(
            (
                torch.equal(full, whole),
                made.stride() == whole.stride(),
                made.requires_grad is False,
                local.is_contiguous(),
                not shares_memory,
            )
        )
    return found


@pytest.mark.ranks
def test_a_parameter_is_cut_without_keeping_the_whole_alive():
    assert run_on_ranks(_distributed, 2) == [[(True,) * 5] * 3] * 2
