"""What several faults need: local pieces of parameters and their gradients, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paralign.prove.fault_run import FaultRun


def local(tensor: Any) -> Tensor:
    """Return the piece of a tensor that this rank holds; writing to it writes to the tensor."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach()


def local_gradients(
    run: FaultRun, chosen: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and local piece of every gradient there is, of the parameters that are chosen."""
    for name, parameter in run.parameters.items():
        if chosen(name) and parameter.grad is not None:
            yield name, local(parameter.grad)


def only_some_partial_sums(run: FaultRun, chosen: Callable[[str], bool]) -> None:
    """Let only the chosen parameters' gradients be summed over tp after a step."""
    names = {id(parameter): name for name, parameter in run.parameters.items()}
    kept = [p for p in run.program._partial_over_tp if chosen(names[id(p)])]
    run.patch(run.program, "_partial_over_tp", kept)


def is_norm(name: str) -> bool:
    """Whether a parameter is the weight of a norm."""
    return name.endswith("norm.weight")


def is_end(name: str) -> bool:
    """Whether a parameter is outside the layers: embedding, last norm, head."""
    return not name.startswith("layers.")


def layer_number(name: str) -> int | None:
    """Return the global number of a parameter's layer; None: it is outside the layers."""
    return None if is_end(name) else int(name.split(".")[1])


def alike_layers(run: FaultRun) -> list[int]:
    """Return the numbers of this rank's layers of the kind that it has most of, in order."""
    kinds: dict[frozenset[str], list[int]] = {}
    numbers = {number for number in map(layer_number, run.parameters) if number is not None}
    for number in sorted(numbers):
        head = f"layers.{number}."
        inner = {name.removeprefix(head) for name in run.parameters if name.startswith(head)}
        kinds.setdefault(frozenset(inner), []).append(number)
    return max(kinds.values(), key=len, default=[])


def swap_(first: Tensor, second: Tensor) -> None:
    """Exchange the contents of two tensors of one shape."""
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
