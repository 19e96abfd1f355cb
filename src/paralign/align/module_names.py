"""Global names of a model's modules, derived from the names of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from paralign.align.names import NamedParameter

# Children that torch's own wrappers add around a module. What is compiled is one box: hooks inside
# of it would cut it into other pieces, and so change what is recorded.
_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class NamedModule:
    """A module under its global name."""

    name: str
    module: nn.Module
    hides: bool = False
    """Whether its parts cannot be seen because they are compiled together."""


def named_modules(
    root: nn.Module, parameters: Sequence[NamedParameter], pattern: str = "*"
) -> list[NamedModule]:
    """List the modules below ``root`` that run, each once, without containers and wrappers.

    A renamed parameter renames the modules around it: ``layers.0.wq.weight`` called
    ``layers.4.wq.weight`` makes ``layers.0`` into ``layers.4``. Modules without parameters follow
    the one that holds them. The root itself is left out if it has children: what it returns is what
    its last child does, or a stage boundary.

    Args:
        root: The model, or one pipeline stage.
        parameters: The names of its parameters.
        pattern: Names to keep, as a glob.
    """
    renamed = _renamed_prefixes(parameters)
    found: list[NamedModule] = []
    seen: set[int] = set()
    for old_name, module, hides in _walk(root, ""):
        if id(module) in seen or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        seen.add(id(module))
        name = _new_name(old_name, renamed)
        if (old_name or not list(root.children())) and fnmatchcase(name, pattern):
            found.append(NamedModule(name, module, hides))
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, bool]]:
    through = [name for name in _WRAPPERS if name in module._modules]
    alone = len(module._modules) == 1 and not module._parameters
    if not through and alone and "module" in module._modules:
        through = ["module"]  # as DDP does
    if through:
        inner = module._modules[through[0]]
        if inner is not None:
            yield from _walk(inner, prefix)
        return
    hides = _COMPILED in module._modules
    yield prefix.rstrip("."), module, hides
    if not hides:
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, f"{prefix}{name}.")


def _renamed_prefixes(parameters: Sequence[NamedParameter]) -> dict[str, str]:
    """Return old -> new for every module name around a renamed parameter."""
    prefixes: dict[str, str] = {}
    for named in parameters:
        old, new = named.source.split("."), named.name.split(".")
        while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
            prefixes.setdefault(".".join(old), ".".join(new))
    return prefixes


def _new_name(name: str, prefixes: dict[str, str]) -> str:
    known, rest = name, ""
    while known:
        if known in prefixes:
            return prefixes[known] + rest
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    return name
