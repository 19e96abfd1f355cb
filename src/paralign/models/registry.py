"""The models that ship with paralign, by name. Nothing here needs torch until one is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from paralign.errors import ConfigError
from paralign.mesh import Degrees
from paralign.models.llama import presets as llama
from paralign.models.llama.published import PUBLISHED as LLAMA_PUBLISHED
from paralign.models.pangu_moe import presets as pangu_moe
from paralign.models.pangu_moe.published import PUBLISHED as PANGU_MOE_PUBLISHED
from paralign.models.published import Published
from paralign.models.rules import did_you_mean, is_number, is_whole

if TYPE_CHECKING:
    from torch import nn

    from paralign.blueprint import Blueprint

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model family: its sizes, its rules, and where its code lives.

    Args:
        name: As in RUN.yaml.
        config_type: The dataclass of its hyper-parameters.
        presets: Functions that return a config, by name.
        problems: ``(config, degrees, seq_len)`` -> every static rule that is broken.
        model_class: ``"module:Class"`` of the plain module, built from a config.
        blueprint_class: ``"module:Class"`` of its blueprint, built from a config.
        published: How it is laid out in published checkpoints.
    """

    name: str
    config_type: type[Any]
    presets: Mapping[str, Callable[[], Any]]
    problems: Callable[[Any, Degrees, int], list[str]]
    model_class: str
    blueprint_class: str
    published: Published

    def configure(
        self, preset: str | None = None, hyper_parameters: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the config of ``preset`` with some hyper-parameters changed.

        Sizes are not judged here: see ``problems``.

        Raises:
            ConfigError: Unknown preset or hyper-parameter, or a value of the wrong type; all are
                listed.
        """
        preset = DEFAULT_PRESET if preset is None else preset
        changes = dict(hyper_parameters or {})
        found = self._type_problems(changes)
        if preset not in self.presets:
            hint = did_you_mean(str(preset), self.presets)
            found.insert(0, f"preset={preset!r} is not a preset of model {self.name!r}. {hint}")
        if found:
            raise ConfigError.from_problems(f"model {self.name!r} cannot be configured", found)
        return replace(self.presets[preset](), **changes)

    def build(self, config: Any) -> nn.Module:
        """Build the plain module. Its weights are torch's defaults; paralign fills them later."""
        model: nn.Module = _load(self.model_class)(config)
        return model

    def blueprint(self, config: Any) -> Blueprint:
        """Build the blueprint of a model of this config."""
        blueprint: Blueprint = _load(self.blueprint_class)(config)
        return blueprint

    def _type_problems(self, changes: Mapping[str, Any]) -> list[str]:
        known = [field.name for field in fields(self.config_type)]
        hints = get_type_hints(self.config_type)
        found = []
        for name, value in changes.items():
            if name not in known:
                hint = did_you_mean(str(name), known)
                found.append(f"{name} is not a hyper-parameter of model {self.name!r}. {hint}")
                continue
            expected, fits = _expected(hints[name])
            if not fits(value):
                found.append(f"{name}={value!r} must be {expected}")
        return found


_PLAIN: Mapping[Any, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        bool: ("true or false", lambda value: isinstance(value, bool)),
        int: ("a whole number", is_whole),
        float: ("a number", is_number),
    }
)


def _expected(hint: Any) -> tuple[str, Callable[[Any], bool]]:
    """Return what a value of this type is called, and a test for it."""
    words = get_args(hint)  # of a Literal
    return (f"one of {', '.join(words)}", words.__contains__) if words else _PLAIN[hint]


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            ModelEntry(
                name="llama",
                config_type=llama.LlamaConfig,
                presets=MappingProxyType(llama.PRESETS),
                problems=llama.problems,
                model_class="paralign.models.llama.model:Llama",
                blueprint_class="paralign.models.llama.blueprint:LlamaBlueprint",
                published=LLAMA_PUBLISHED,
            ),
            ModelEntry(
                name="pangu_moe",
                config_type=pangu_moe.PanguMoeConfig,
                presets=MappingProxyType(pangu_moe.PRESETS),
                problems=pangu_moe.problems,
                model_class="paralign.models.pangu_moe.model:PanguMoe",
                blueprint_class="paralign.models.pangu_moe.blueprint:PanguMoeBlueprint",
                published=PANGU_MOE_PUBLISHED,
            ),
        )
    }
)


def find_model(name: str) -> ModelEntry:
    """Return the model called ``name``.

    Raises:
        ConfigError: There is no such model; the nearest name is suggested.
    """
    if name not in MODELS:
        raise ConfigError(
            f"model name={name!r} is not a model of paralign. {did_you_mean(str(name), MODELS)} "
            'For a model of your own, give build and blueprint: {build: "my_pkg.model:build", '
            'blueprint: "my_pkg.model:blueprint"}.'
        )
    return MODELS[name]
