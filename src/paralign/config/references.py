"""Looks up ``pkg.module:name`` that a user wrote, without importing it.

The module imports torch, and a wrong name is to be refused before that, so the file is read as
syntax only. Importing it for real comes later and has the last word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paralign.config.nearest import suggest
from paralign.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a function takes, as far as its source tells."""

    required: tuple[str, ...]
    defaults: Mapping[str, Any]  # optional arguments; None where the default is no literal
    takes_any: bool = False

    @property
    def names(self) -> list[str]:
        """All arguments, required ones first."""
        return [*self.required, *self.defaults]


UNKNOWN = Signature(required=(), defaults={}, takes_any=True)


def read_signature(key: str, reference: str) -> Signature:
    """Return what ``reference`` takes, without importing it.

    The current directory is searched first, as ``python -m`` does.

    Args:
        key: The config key that holds the reference, for messages.
        reference: ``pkg.module:name``.

    Raises:
        ConfigError: The text has another form, or there is no such module or name.
    """
    module, name = _split(key, reference)
    file = _find(key, reference, module).file
    if file is None or file.suffix != ".py":
        return UNKNOWN  # compiled, or a folder: only the import can tell
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(
            f"{key}={reference!r}: {file} cannot be read as Python: {error}. Mend that file."
        ) from None
    found = dict(_definitions(tree.body))
    if name not in found and not {"*", "__getattr__"} & found.keys():
        raise ConfigError(
            f"{key}={reference!r}: {file} defines no {name}. "
            + (suggest(name, found) if found else "Define it there.")
        )
    return _signature(found.get(name))


def _split(key: str, reference: str) -> tuple[str, str]:
    module, colon, name = reference.partition(":")
    if not (colon and name.isidentifier() and all(p.isidentifier() for p in module.split("."))):
        raise ConfigError(
            f"{key}={reference!r} must be an import path and a name joined by a colon. "
            f'Write `{key.rpartition(".")[2]}: "my_pkg.model:build"`.'
        )
    return module, name


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a module or package is."""

    file: Path | None  # None: a folder without __init__.py
    folders: tuple[Path, ...] = ()  # where a package's modules are


def _find(key: str, reference: str, module: str) -> _Place:
    top, *rest = module.split(".")
    place = _look_in([Path.cwd()], top) or _look_among_installed(top)
    known = top
    for part in rest:
        # Not `find_spec` down here: it would import the packages on the way.
        if place is not None:
            place, known = _look_in(place.folders, part), f"{known}.{part}"
    if place is None:
        raise ConfigError(
            f"{key}={reference!r}: there is no module {known}. Start paralign in the folder that "
            f"holds {top}, or install it."
        )
    return place


def _look_in(folders: Iterable[Path], name: str) -> _Place | None:
    bare = []
    for folder in folders:
        package = folder / name
        if (package / "__init__.py").is_file():
            return _Place(file=package / "__init__.py", folders=(package,))
        for suffix in all_suffixes():
            if (file := folder / f"{name}{suffix}").is_file():
                return _Place(file=file)
        if package.is_dir():
            bare.append(package)
    return _Place(file=None, folders=tuple(bare)) if bare else None


def _look_among_installed(module: str) -> _Place | None:
    try:
        spec = find_spec(module)
    except ValueError:  # in sys.modules without a spec, such as __main__
        return None
    if spec is None:
        return None
    folders = tuple(Path(folder) for folder in spec.submodule_search_locations or ())
    return _Place(file=Path(spec.origin) if spec.origin else None, folders=folders)


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module's top level binds; ``*`` for a star import."""
    for node in body:
        yield from ((name, node) for name in _bound_names(node))
        for branch in ("body", "orelse", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from _definitions(getattr(node, branch, []))


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def _signature(node: ast.stmt | None) -> Signature:
    if isinstance(node, ast.ClassDef):
        own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        if "__init__" not in own:
            return UNKNOWN
        inner = _arguments(own["__init__"].args)
        return Signature(
            required=inner.required[1:], defaults=inner.defaults, takes_any=inner.takes_any
        )
    return _arguments(node.args) if isinstance(node, ast.FunctionDef) else UNKNOWN


def _arguments(args: ast.arguments) -> Signature:
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    split = len(positional) - len(args.defaults)
    pairs = list(zip(positional[split:], args.defaults, strict=True))
    required = positional[:split]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is None:
            required.append(arg.arg)
        else:
            pairs.append((arg.arg, default))
    return Signature(
        required=tuple(required),
        defaults={name: _literal(node) for name, node in pairs},
        takes_any=args.kwarg is not None,
    )


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
