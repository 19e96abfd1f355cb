from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench._traffic import Traffic, TrafficCounter
from paralign.testing import run_on_ranks


def known_traffic() -> Traffic:
    rank = dist.get_rank()
    ten = torch.zeros(10, dtype=torch.float32)
    with TrafficCounter() as counter:
        dist.all_reduce(ten)
        dist.all_reduce(ten[:5].double())
        dist.all_gather_single(torch.empty(30), ten)
        dist.reduce_scatter_single(torch.empty(4), torch.empty(12))
        dist.all_to_all_single(torch.empty(9), torch.empty(9))
        # Only what goes to the others counts: 2 elements to the left, 3 to the right.
        given = [0, 0, 0]
        given[rank - 1], given[rank], given[(rank + 1) % 3] = 2, 7, 3
        taken = [0, 0, 0]
        taken[rank - 1], taken[rank], taken[(rank + 1) % 3] = 3, 7, 2
        dist.all_to_all_single(torch.empty(12), torch.empty(12), taken, given)
        dist.broadcast(ten, src=0)
        dist.barrier()
        if rank == 0:
            dist.send(ten, dst=1)
        if rank == 1:
            dist.recv(ten, src=0)
    dist.all_reduce(ten)  # after the end
    traffic: Traffic = counter.traffic()
    return traffic


@pytest.mark.ranks
def test_calls_and_bytes_of_every_kind():
    common = {
        "all-gather": (1, 80),
        "all-reduce": (2, 80),
        "all-to-all": (2, 6 * 4 + 5 * 4),
        "broadcast": (1, 40),
        "reduce-scatter": (1, 32),
    }
    first, second, third = run_on_ranks(known_traffic, 3)
    assert first == common | {"send": (1, 40)}
    assert second == common | {"receive": (1, 40)}
    assert third == common


def unknown_kind() -> str:
    with TrafficCounter(), pytest.raises(NotImplementedError) as caught:
        dist.gather(torch.zeros(1), [torch.zeros(1)])
    return str(caught.value)


@pytest.mark.ranks
def test_a_kind_it_does_not_know_is_not_missed():
    assert run_on_ranks(unknown_kind, 1) == ["the bytes of collective 'gather_' are not known here"]
