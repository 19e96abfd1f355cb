from __future__ import annotations

import torch
from torch import nn

from paralign.align.forward_count import ForwardCount


def test_forwards_with_gradients_are_counted_while_it_runs() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    counter = ForwardCount([first, second])
    first(torch.ones(2))
    counter.start()
    second(first(torch.ones(2)))
    with torch.no_grad():
        first(torch.ones(2))
    assert counter.count == 2
    counter.stop()
    first(torch.ones(2))
    assert counter.count == 2
