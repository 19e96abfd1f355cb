"""What a call keeps of the memory that tensors live in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def bytes_held(call: Callable[[], Any]) -> int:
    """Return by how much the memory of tensors has grown when ``call`` returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = call()
    del result
    return sum(event.self_cpu_memory_usage for event in run.key_averages())
