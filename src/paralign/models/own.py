"""Loads a user's own model and blueprint by their import paths.

Nothing here needs torch by itself; the user's module imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paralign.errors import ConfigError
from paralign.models.rules import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from paralign.blueprint import Blueprint


def load_own_model(
    build: str, blueprint: str, hyper_parameters: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Blueprint]:
    """Build a user's model, and the blueprint that says how it is cut.

    Args:
        build: ``"pkg.module:function"``; the function takes the hyper-parameters by name and
            returns the module.
        blueprint: ``"pkg.module:name"`` of a function ``model -> Blueprint``, or of a ``Blueprint``
            class without arguments.
        hyper_parameters: Keyword arguments of ``build``.

    Raises:
        ConfigError: A path leads nowhere, a hyper-parameter does not fit ``build``, or a function
            returns something else. Whatever the user's own functions raise passes through
            unchanged.
    """
    from torch import nn

    from paralign.blueprint import Blueprint

    build_function = load_symbol(build, key="build")
    blueprint_function = load_symbol(blueprint, key="blueprint")
    arguments = dict(hyper_parameters or {})
    _check_arguments(build, build_function, arguments)
    model = build_function(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"build={build!r} returned {_describe(model)}, not a torch.nn.Module. Return the whole "
            "model."
        )
    is_class = isinstance(blueprint_function, type) and issubclass(blueprint_function, Blueprint)
    made = blueprint_function() if is_class else blueprint_function(model)
    if not isinstance(made, Blueprint):
        raise ConfigError(
            f"blueprint={blueprint!r} returned {_describe(made)}, not a paralign.Blueprint. Return "
            "an instance of your Blueprint subclass."
        )
    return model, made


def load_symbol(path: str, *, key: str = "path") -> Callable[..., Any]:
    """Return what ``"pkg.module:name"`` points at.

    The current folder is searched first, as ``python -m`` does, but only during this import.

    Args:
        path: Module, colon, name.
        key: The config key that ``path`` comes from, for messages.

    Raises:
        ConfigError: The path has another form, the module is not found or cannot be imported, or it
            has no such callable.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and name.isidentifier() and all(map(str.isidentifier, module_name.split(".")))):
        raise ConfigError(f"{key}={path!r} must look like 'pkg.module:name'.")
    module = _import(module_name, key=key, path=path)
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        hint = did_you_mean(name, public) if public else "The module is empty."
        raise ConfigError(f"{key}={path!r}: module {module_name!r} has no {name!r}. {hint}")
    symbol = getattr(module, name)
    if not callable(symbol):
        raise ConfigError(
            f"{key}={path!r} is {_describe(symbol)}, which cannot be called. Name a function or a "
            "class."
        )
    found: Callable[..., Any] = symbol
    return found


def _import(module_name: str, *, key: str, path: str) -> Any:
    with _current_folder_first() as folder:
        try:
            return import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that exists but imports something missing is another mistake than a wrong
            # path.
            if error.name and (
                module_name == error.name or module_name.startswith(error.name + ".")
            ):
                raise ConfigError(
                    f"{key}={path!r}: there is no module {error.name!r} in {folder} or in this "
                    "Python's packages. Start paralign from the folder that holds it, or install "
                    "it."
                ) from error
            raise ConfigError(
                f"{key}={path!r}: module {module_name!r} needs {error.name!r}, which is not "
                "installed in this Python."
            ) from error
        except Exception as error:
            raise ConfigError(
                f"{key}={path!r}: importing module {module_name!r} failed with "
                f"{type(error).__name__}: {error}"
            ) from error


@contextmanager
def _current_folder_first() -> Iterator[Path]:
    folder = Path.cwd()
    sys.path.insert(0, str(folder))
    invalidate_caches()  # the user may have written the file a moment ago
    try:
        yield folder
    finally:
        # The module may have changed sys.path too: take back only what was put there.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _check_arguments(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else [name for name in arguments if name not in known]
    hint = {name: did_you_mean(name, known) if known else "It takes none." for name in unknown}
    problems = [
        f"{name} is not a hyper-parameter of this function. {hint[name]}" for name in unknown
    ]
    problems += [
        f"{p.name} has no default and must be set beside build"
        for p in named
        if p.default is p.empty and p.name not in arguments
    ]
    if problems:
        raise ConfigError.from_problems(f"build={path!r} cannot be called", problems)


def _describe(value: object) -> str:
    return f"an object of type {type(value).__name__}"
