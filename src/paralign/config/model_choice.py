"""Resolves the model section: a registered model with its hyper-parameters, or the user's own.

Choosing is torch-free, so that a wrong name or size is refused at once; building imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from paralign.config.nearest import nearest, suggest
from paralign.config.parse import show
from paralign.config.references import Signature, read_signature
from paralign.config.run import ModelSection
from paralign.config.source import describe_type
from paralign.errors import ConfigError
from paralign.models.own import load_own_model
from paralign.models.registry import DEFAULT_PRESET, MODELS

if TYPE_CHECKING:
    from torch import nn

    from paralign.blueprint import Blueprint

_STRICT = ConfigDict(strict=True)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A resolved model section, as far as it could be resolved without torch."""

    problems: tuple[str, ...] = ()
    config: Any = None  # a registered model's own config; None for a user's model
    known: Mapping[str, Any] = field(default_factory=dict)  # a user's model: what its source tells

    def size(self, name: str) -> int | None:
        """Return the hyper-parameter ``name`` when it is known to be a whole number."""
        value = self.known.get(name) if self.config is None else getattr(self.config, name, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def choose_model(section: ModelSection) -> ModelChoice:
    """Resolve ``section`` and collect everything that is wrong with it."""
    own = section.build is not None or section.blueprint is not None
    if own and (section.name is not None or section.preset is not None):
        return ModelChoice(
            problems=(
                "model gives both name/preset (a model of paralign) and build/blueprint (your "
                "own). Keep one of the two.",
            )
        )
    if own:
        return _choose_own(section)
    if section.name is None:
        return ModelChoice(
            problems=(
                "model.name is missing, so there is no model to run. Write `model: {name: "
                f"{next(iter(MODELS))}}}`, or give model.build and model.blueprint.",
            )
        )
    return _choose_registered(section.name, section)


def build_model(section: ModelSection) -> tuple[nn.Module, Blueprint]:
    """Build the module, with whatever weights it starts with, and its blueprint. Imports torch.

    Raises:
        ConfigError: The section has problems; or the user's own module cannot be imported, or its
            functions return something else.
    """
    choice = choose_model(section)
    if choice.problems:
        raise ConfigError.from_problems("model", choice.problems)
    if section.name is not None:
        entry = MODELS[section.name]
        return entry.build(choice.config), entry.blueprint(choice.config)
    assert section.build is not None and section.blueprint is not None  # else a problem above
    return load_own_model(section.build, section.blueprint, section.hyper_parameters)


def _choose_registered(name: str, section: ModelSection) -> ModelChoice:
    if name not in MODELS:
        return ModelChoice(
            problems=(f"model.name={name!r} is not a model. {suggest(name, MODELS)}",)
        )
    entry = MODELS[name]
    preset = section.preset or DEFAULT_PRESET
    problems = []
    if preset not in entry.presets:
        problems.append(
            f"model.preset={preset!r} is not a preset of {name}. {suggest(preset, entry.presets)}"
        )
    hints = get_type_hints(entry.config_type)
    fields = {item.name: hints[item.name] for item in dataclasses.fields(entry.config_type)}
    for key, value in section.hyper_parameters.items():
        if key not in fields:
            problems.append(_unknown_hyper(key, [*ModelSection.model_fields, *fields], name))
        elif not _fits(fields[key], value):
            problems.append(
                f"model.{key}={show(value)} ({describe_type(value)}) must be "
                f"{_words(fields[key])}. "
                f"Write `{key}: {show(getattr(entry.presets[DEFAULT_PRESET](), key))}`."
            )
    if problems:
        return ModelChoice(problems=tuple(problems))
    config = dataclasses.replace(entry.presets[preset](), **section.hyper_parameters)
    return ModelChoice(config=config)


def _words(hint: Any) -> str:
    choices = get_args(hint)  # of a Literal
    return f"one of {', '.join(choices)}" if choices else _WORDS.get(hint, str(hint))


def _fits(hint: Any, value: Any) -> bool:
    try:
        TypeAdapter(hint, config=_STRICT).validate_python(value)
    except ValidationError:
        return False
    return True


def _unknown_hyper(key: str, known: list[str], owner: str) -> str:
    near = nearest(key, known)
    hint = f"Did you mean model.{near}?" if near else f"It has {', '.join(known)}."
    return f"model.{key}: {owner} has no such hyper-parameter. {hint}"


def _choose_own(section: ModelSection) -> ModelChoice:
    if section.build is None or section.blueprint is None:
        missing = "build" if section.build is None else "blueprint"
        return ModelChoice(
            problems=(
                f"model.{missing} is missing: your own model needs both model.build and "
                f'model.blueprint. Write `{missing}: "my_pkg.model:{missing}"`.',
            )
        )
    problems: list[str] = []
    signatures: list[Signature] = []
    for key, reference in (("model.build", section.build), ("model.blueprint", section.blueprint)):
        try:
            signatures.append(read_signature(key, reference))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        return ModelChoice(problems=tuple(problems))
    build, given = signatures[0], section.hyper_parameters
    if not build.takes_any:
        problems += [
            _unknown_hyper(key, build.names, section.build)
            for key in given
            if key not in build.names
        ]
    problems += [
        f"model.{name} is missing: {section.build} needs it. Write `{name}: ...` below model."
        for name in build.required
        if name not in given
    ]
    return ModelChoice(problems=tuple(problems), known={**build.defaults, **given})
