from __future__ import annotations

import torch

from paralign.prove.hooks import Hooks


def test_hooks_are_called_in_order_and_may_replace_the_batch():
    hooks = Hooks()
    seen: list[object] = []
    hooks.on_batch.extend([lambda batch: [*batch, 1], lambda batch: batch.append(2)])
    hooks.after_backward.append(lambda: seen.append("backward"))
    hooks.before_step.append(seen.append)
    hooks.after_step.append(seen.append)
    assert hooks.change_batch([0]) == [0, 1, 2]  # the second changes it in place
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    hooks.backward_done()
    hooks.step_begins(optimizer)
    hooks.step_done(optimizer)
    assert seen == ["backward", optimizer, optimizer]


def test_without_hooks_nothing_changes():
    batch = object()
    assert Hooks().change_batch(batch) is batch
