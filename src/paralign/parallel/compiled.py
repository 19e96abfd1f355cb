"""``torch.compile`` of each block, with what it cannot trace left as it is.

Only a layer's ``forward`` is compiled. Around it stay FSDP, which gathers parameters before and
frees them after, recomputation, which calls it again, and hooks; names do not change::

    stage -> layer (hooks of FSDP) -> recompute -> compiled forward -> core, experts: as they are

What talks to other ranks from inside a layer (attention cores, experts) runs between two graphs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paralign.errors import ConfigError

BACKENDS = ("none", "inductor", "aot_eager", "eager")

# Layers of one kind share their graphs; each kind, mode and shape of a batch takes one.
_MOST_GRAPHS = 64


@dataclass(frozen=True)
class Compile:
    """Whether blocks are compiled.

    Attributes:
        backend: ``"none"``; ``"inductor"``: torch's own compiler; ``"aot_eager"`` and ``"eager"``:
            graphs are traced and run as they are, to tell what tracing changes from what compiling
            does.
    """

    backend: str = "none"

    @property
    def is_on(self) -> bool:
        """Whether anything is compiled."""
        return self.backend != "none"


def check_compiler(compiling: Compile, device_type: str) -> None:
    """Check that blocks can be compiled on this machine.

    Args:
        compiling: What is asked for.
        device_type: Where blocks run.

    Raises:
        ConfigError: There is no such backend, or it lacks a compiler.
    """
    if compiling.backend not in BACKENDS:
        raise ConfigError(
            f"compile backend={compiling.backend!r} is not known. Use one of {', '.join(BACKENDS)}."
        )
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    is_there = any(shutil.which(name) for name in compilers if name)
    if compiling.backend == "inductor" and device_type == "cpu" and not is_there:
        raise ConfigError(
            "compile backend='inductor' writes C++ for the CPU, and there is no compiler (g++, "
            "clang++ or what CXX names). Install one, or use backend='none'."
        )


def apply_compile(
    layer: nn.Module, compiling: Compile, *, outside: Iterable[str] = ()
) -> nn.Module:
    """Compile the forward of ``layer``, in place, when it is first called, and return it.

    Call it after everything that wraps modules inside of the layer, and before recomputation and
    FSDP.

    Comm:
        none of its own.

    Args:
        layer: One layer.
        compiling: What is asked for.
        outside: Modules inside of ``layer`` that stay as they are.
    """
    if not compiling.is_on:
        return layer
    for name in outside:
        module: Any = layer.get_submodule(name)
        module.forward = torch.compiler.disable(module.forward)
    # The overloads that type checkers see lack the last one.
    settings: dict[str, Any] = {"backend": compiling.backend, "recompile_limit": _MOST_GRAPHS}
    compiled: Any = torch.compile(layer.forward, **settings)
    layer.forward = compiled
    return layer


def modules_outside(layer: str, cores: Iterable[str], experts: Iterable[str]) -> list[str]:
    """Return the modules of a layer that are not traced: names inside of the layer.

    Args:
        layer: Its global name.
        cores: Attention cores, by names inside of a layer: they talk to other ranks, and call one
            fused kernel anyway.
        experts: Stacks of experts of any layers, by global names. How many tokens each expert gets
            is known when it runs, so what holds them, with the router, stays as it is.
    """
    inner = [n.removeprefix(f"{layer}.") for n in experts if n.startswith(f"{layer}.")]
    holders = [name.rpartition(".")[0] or name for name in inner]
    return list(dict.fromkeys([*cores, *holders]))
