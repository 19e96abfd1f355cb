"""Global names of a model's parameters, through wrappers and over several stage modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paralign.errors import ConfigError

# Children that torch's own wrappers add around a module.
_WRAPPER_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

NameRule = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under its global name."""

    name: str
    aliases: tuple[str, ...]
    source: str
    """Its name in the module, which tells copies of one parameter apart."""
    parameter: nn.Parameter
    owner: nn.Module
    owner_name: str


def describe_owners(parameters: Sequence[NamedParameter]) -> dict[str, dict[str, Any]]:
    """Say which module owns each parameter and where its class is defined."""
    places = {kind: _place_of(kind) for kind in {type(named.owner) for named in parameters}}
    return {
        named.name: {
            "module": named.owner_name,
            "class": type(named.owner).__name__,
            **places[type(named.owner)],
        }
        for named in parameters
    }


def _place_of(kind: type) -> dict[str, Any]:
    try:
        return {"file": inspect.getsourcefile(kind), "line": inspect.getsourcelines(kind)[1]}
    except (OSError, TypeError):  # defined in a notebook or in C
        return {"file": None, "line": None}


def named_parameters(
    modules: Sequence[nn.Module], names: NameRule = None, *, holds_all: bool = True
) -> list[NamedParameter]:
    """List every parameter of ``modules`` once, in the order in which they are registered.

    A parameter found under several names is tied: the first name is its name, the others aliases.
    Prefixes that wrappers add (DDP's ``module.``, ``_orig_mod.``, ...) are left out.

    Args:
        modules: One model, or the stage modules that this rank holds, with global names.
        names: Renames parameters: old name -> new name, or a function. Two parameters may get the
            same
            new name: they are copies of one (a tied pair on two stages).
        holds_all: No other rank holds further parameters, so that a rule which renames nothing is
            wrong.

    Raises:
        ConfigError: There are no parameters, two different ones have the same name, or ``names``
            renames what does not exist. All problems are listed.
    """
    found: dict[int, _Found] = {}
    holder: dict[str, int] = {}
    clashes: list[str] = []
    unused = set(names) if isinstance(names, Mapping) and holds_all else set()
    for module in modules:
        for old_name, parameter, owner, owner_name in _walk(module, ""):
            unused.discard(old_name)
            known = found.setdefault(
                id(parameter), _Found(parameter, owner, owner_name, old_name, [])
            )
            if holder.setdefault(old_name, id(parameter)) != id(parameter):
                clashes.append(
                    f"two different parameters are both called {old_name!r}. Pipeline chunks must "
                    "keep global names; record each chunk with the names of the whole model"
                )
            if (name := _rename(old_name, names)) not in known.names:
                known.names.append(name)
    problems = sorted(set(clashes))
    problems += [f"names renames {name!r}, which is no parameter" for name in sorted(unused)]
    if not found:
        problems.append("the model has no parameters")
    if problems:
        raise ConfigError.from_problems("cannot name the parameters to record", problems)
    return [
        NamedParameter(
            name=item.names[0],
            aliases=tuple(item.names[1:]),
            source=item.source,
            parameter=item.parameter,
            owner=item.owner,
            owner_name=item.owner_name,
        )
        for item in found.values()
    ]


@dataclass
class _Found:
    parameter: nn.Parameter
    owner: nn.Module
    owner_name: str
    source: str
    names: list[str]


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter, nn.Module, str]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, module, prefix.rstrip(".")
    for name, child in module._modules.items():
        if child is not None:
            through = name in _WRAPPER_CHILDREN or _is_wrapper(module, name)
            yield from _walk(child, prefix if through else f"{prefix}{name}.")


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether ``module`` does nothing but hold the child called ``module``, as DDP does."""
    return child == "module" and len(module._modules) == 1 and not module._parameters


def _rename(name: str, names: NameRule) -> str:
    if names is None:
        return name
    return names.get(name, name) if isinstance(names, Mapping) else names(name)
