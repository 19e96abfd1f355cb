"""A process calls elementwise functions on one element first; tests/engine has the race."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paralign.align.record import record
from paralign.errors import RankError
from paralign.launch import join_world
from paralign.launch.rank import _join_process_group
from paralign.randomness import Init, fill_
from paralign.vector_math import settle_vector_math

# Names of vector functions in torch's source, and in the list of pytorch issue 188792.
FUNCTIONS = set(
    "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc".split()
)


class FirstCalls(TorchDispatchMode):
    """Notes how many elements each function was first called with, in each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in FUNCTIONS:
            self.num_elements.setdefault((name, args[0].dtype), args[0].numel())
        return func(*args, **kwargs or {})


def all_of_one_element() -> dict[tuple[str, torch.dtype], int]:
    return {(name, dtype): 1 for name in FUNCTIONS for dtype in (torch.float32, torch.float64)}


def test_all_functions_are_called_in_both_dtypes():
    with FirstCalls() as seen:
        settle_vector_math()
    assert seen.num_elements == all_of_one_element()


def test_weights_are_filled_after_it():
    weight = torch.empty(64, 64)
    with FirstCalls() as seen:
        fill_(weight, Init.normal(std=1.0), seed=0, name="w", global_shape=(64, 64), offsets=(0, 0))
    assert seen.num_elements == all_of_one_element()


def test_a_recording_begins_with_it(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with FirstCalls() as seen, record(tmp_path / "trace", model, steps=1):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    assert seen.num_elements == all_of_one_element()


@pytest.mark.parametrize("start", ["here", "torchrun"])
def test_a_rank_begins_with_it(start: str, monkeypatch: pytest.MonkeyPatch):
    class Settled(Exception):
        pass

    monkeypatch.setattr("paralign.vector_math.settle_vector_math", Mock(side_effect=Settled))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    if start == "here":
        with pytest.raises(Settled):
            _join_process_group(Mock())
    else:
        with pytest.raises(RankError, match="Settled"), join_world("cpu"):
            pytest.fail("the rank joined before it")
