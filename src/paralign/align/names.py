"""Global names of a model's parameters, through wrappers and over several stage modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from paralign.align.fused import FusedPart
from paralign.align.name_rules import NameRule, NameRules
from paralign.align.sources.flat_parameter import FlatPart, FlatUnits, flat_parts
from paralign.errors import ConfigError

# Children that torch's own wrappers add around a module.
WRAPPER_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under its global name, or the part of a torch parameter that has this name."""

    name: str
    aliases: tuple[str, ...]
    source: str
    """Its name in the module, which tells copies of one parameter apart."""
    parameter: nn.Parameter
    owner: nn.Module
    owner_name: str
    flat: FlatPart | None = None
    """Which elements of a flat local tensor are its own (FSDP1)."""
    part: FusedPart | None = None
    """Which part of a fused parameter it is."""


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
    modules: Sequence[nn.Module],
    names: NameRule | NameRules = None,
    *,
    buffers: str | None = None,
    holds_all: bool = True,
    global_layers: bool = False,
) -> list[NamedParameter]:
    """List every parameter of ``modules`` once, in the order in which they are registered.

    A parameter found under several names is tied: the first name is its name, the others aliases.
    Prefixes that wrappers add (DDP's ``module.``, ``_orig_mod.``, ...) are left out. FSDP1's flat
    parameters are taken apart into the parameters they hold.

    Args:
        modules: One model, or the stage modules that this rank holds, with global names.
        names: Renames parameters: old name or pattern -> new name or ``Fused``, or a function. Two
            parameters may get the same new name: they are copies of one (a tied pair on two
            stages).
        buffers: Pattern of the names of buffers to list as well, as parameters without a gradient.
        holds_all: No other rank holds further parameters, so that a rule which renames nothing is
            wrong.
        global_layers: Modules say their number in the whole model by ``layer_number``, counted from
            1, and it replaces their place in the list of this stage.

    Raises:
        ConfigError: There are no parameters, two different ones have the same name, or ``names``
            renames what does not exist. All problems are listed.
    """
    found: dict[tuple[int, int], _Found] = {}
    holder: dict[str, tuple[int, int]] = {}
    clashes: list[str] = []
    rules = names if isinstance(names, NameRules) else NameRules(names)
    for module in modules:
        for old_name, parameter, owner, owner_name, flat in _walk(
            module, "", FlatUnits(), global_layers, buffers
        ):
            key = (id(parameter), -1 if flat is None else flat.index)
            known = found.setdefault(key, _Found(parameter, owner, owner_name, old_name, flat))
            if holder.setdefault(old_name, key) != key:
                clashes.append(
                    f"two different parameters are both called {old_name!r}. Pipeline chunks must "
                    "keep global names; record each chunk with the names of the whole model"
                )
            for new in rules.of(old_name):
                number = -1 if new.part is None else new.part.index
                _, names_of_part = known.names.setdefault(number, (new.part, []))
                if new.name not in names_of_part:
                    names_of_part.append(new.name)
    problems = sorted(set(clashes))
    if holds_all:
        problems += [f"names renames {name!r}, which is no parameter" for name in rules.unused()]
    if not found:
        problems.append("the model has no parameters")
    if problems:
        raise ConfigError.from_problems("cannot name the parameters to record", problems)
    return [
        NamedParameter(
            name=names_of_part[0],
            aliases=tuple(names_of_part[1:]),
            source=item.source,
            parameter=item.parameter,
            owner=item.owner,
            owner_name=item.owner_name,
            flat=item.flat,
            part=part,
        )
        for item in found.values()
        for part, names_of_part in item.names.values()
    ]


def named_buffers(
    modules: Sequence[nn.Module], names: NameRule | NameRules = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every buffer of ``modules`` under each of its names, named as parameters are."""
    rules = names if isinstance(names, NameRules) else NameRules(names)
    for module in modules:
        for old_name, found, *_ in _walk(module, "", FlatUnits(), False, "*"):
            if not isinstance(found, nn.Parameter):
                yield from ((new.name, found) for new in rules.of(old_name) if new.part is None)


@dataclass
class _Found:
    parameter: nn.Parameter
    owner: nn.Module
    owner_name: str
    source: str
    flat: FlatPart | None
    names: dict[int, tuple[FusedPart | None, list[str]]] = field(default_factory=dict)
    """By the number of the part (-1: all of it), the part and its names."""


_Walked = tuple[str, nn.Parameter, nn.Module, str, FlatPart | None]


def _walk(
    module: nn.Module, prefix: str, units: FlatUnits, global_layers: bool, buffers: str | None
) -> Iterator[_Walked]:
    units = units.within(module)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parts := flat_parts(parameter, units.ranks.get(id(parameter), ())):
            for part in parts:
                for fqn in (part.fqn, *part.aliases):
                    inner = prefix + _without_wrappers(fqn)
                    owner_name = inner.rpartition(".")[0]
                    yield inner, parameter, part.owner or module, owner_name, part
        else:
            flat = units.originals.get(id(parameter))
            yield prefix + name, parameter, module, prefix.rstrip("."), flat
    for name, buffer in module._buffers.items():
        if buffer is not None and buffers is not None and fnmatchcase(prefix + name, buffers):
            # All that is read of a frozen parameter, a buffer has too.
            yield prefix + name, cast(nn.Parameter, buffer), module, prefix.rstrip("."), None
    for name, child in module._modules.items():
        if child is not None:
            inner = child_prefix(module, prefix, name, child, global_layers)
            yield from _walk(child, inner, units, global_layers, buffers)


def _without_wrappers(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part not in WRAPPER_CHILDREN)


def child_prefix(
    module: nn.Module, prefix: str, name: str, child: nn.Module, global_layers: bool
) -> str:
    """Return the prefix of the names inside ``child``: none for what is inside a wrapper."""
    if name in WRAPPER_CHILDREN or _is_wrapper(module, name):
        return prefix
    number = getattr(child, "layer_number", None)
    if global_layers and name.isdigit() and isinstance(number, int) and number >= 1:
        name = str(number - 1)
    return f"{prefix}{name}."


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether ``module`` does nothing but hold the child called ``module``, as DDP does."""
    return child == "module" and len(module._modules) == 1 and not module._parameters
