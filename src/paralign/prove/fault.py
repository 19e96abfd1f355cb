"""A small function that breaks one thing on every rank, and what a tool should say about it.

Such as this one::

    @pa.fault(needs={"cp"}, component="data", axes={"cp"}, cause="mask_or_positions")
    def positions_restart_on_every_cp_rank(run):
        def count_from_zero(batch): ...
        run.on_batch(count_from_zero)
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paralign.config.nearest import suggest
from paralign.errors import ConfigError

if TYPE_CHECKING:
    from paralign.config.run import RunConfig
    from paralign.prove.fault_run import FaultRun

COMPONENTS = (
    "data",
    "config",
    "weights",
    "forward",
    "loss",
    "backward",
    "reduction",
    "clipping",
    "optimizer",
    "state",
)
CAUSES = (
    "constant_factor",
    "missing_reduction",
    "double_reduction",
    "wrong_group",
    "missing_contribution",
    "token_weighting",
    "wrong_layer",
    "permuted_shards",
    "single_rank",
    "full_sequence",
    "wrong_axis",
    "mask_or_positions",
    "label_shift",
    "different_data",
    "different_config",
    "reported_value",
    "wrong_norm",
    "rng",
    "precision",
    "stale",
    "unknown",
)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

# What a fault may need of a config besides axes, and how to see whether it is there.
TRAITS: Mapping[str, Callable[[RunConfig], bool]] = {
    "accumulation": lambda config: config.pipeline.num_microbatches > 1,
    "padding": lambda config: config.data.padding > 0,
    "clip": lambda config: config.optimizer.clip is not None,
    "steps": lambda config: config.align.steps > 1,
    "adamw": lambda config: config.optimizer.name == "adamw",
    "gathered_kv": lambda config: config.context.ulysses_degree == 1,
    "ulysses": lambda config: config.context.ulysses_degree != 1,
    "untied": lambda config: config.model.hyper_parameters.get("tie_embeddings") is not True,
    "tied": lambda config: config.model.hyper_parameters.get("tie_embeddings") is True,
    "whole_head": lambda config: config.mesh.tp == 1 and config.loss.chunks == 1,
    "shared_heads": lambda config: _num_kv_heads(config) < config.mesh.tp,
    "virtual_stages": lambda config: (config.pipeline.stages_per_rank or 1) > 1,
    "experts": lambda config: bool(_of_model(config, "num_experts")),
    "latent": lambda config: bool(_of_model(config, "kv_lora_rank")),
    "shared_expert": lambda config: bool(_of_model(config, "shared_hidden_size")),
    "normalised": lambda config: _of_model(config, "router_normalise") in ("sum", "softmax"),
    "scaled_routing": lambda config: _of_model(config, "router_scaling") not in (None, 1.0),
    "balance_loss": lambda config: bool(_of_model(config, "balance_loss")),
    "router_bias": lambda config: bool(_of_model(config, "bias_update_speed")),
    "recompute": lambda config: config.recompute.parts != "none",
}


def _num_kv_heads(config: RunConfig) -> int:
    return _of_model(config, "num_kv_heads") or config.mesh.tp


def _of_model(config: RunConfig, name: str) -> Any:
    """Return a hyper-parameter of a model of paralign; None if there is none of that name."""
    from paralign.config.model_choice import choose_model

    return getattr(choose_model(config.model).config, name, None)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing to break, and what is to be said about it.

    Attributes:
        name: Its name, that of the function.
        breaks: Called on every rank after ``parallelize`` and before the first step.
        needs: Mesh axes that must have more than one rank, and traits (:data:`TRAITS`) that the
            config must have.
        component: What a right finding names.
        axes: The mesh axes that a right finding names; empty: none.
        cause: The cause that a right finding names.
        any_program: It uses nothing of paralign's own parallel code, so that it also fits a user's
            program.
    """

    name: str
    breaks: Callable[[FaultRun], None]
    needs: frozenset[str]
    component: str
    axes: frozenset[str]
    cause: str
    any_program: bool = False

    @property
    def description(self) -> str:
        """The first line of the function's docstring."""
        return (self.breaks.__doc__ or "").strip().partition("\n")[0]

    @property
    def family(self) -> str:
        """The file that it is in."""
        return self.breaks.__module__.rpartition(".")[2]

    def lacks(self, config: RunConfig) -> list[str]:
        """Return what ``config`` would need for this fault to do anything, in words."""
        found = [a for a in AXES if a in self.needs and getattr(config.mesh, a) == 1]
        found += [t for t in TRAITS if t in self.needs and not TRAITS[t](config)]
        if config.program is not None and not self.any_program:
            found.append("paralign's own parallel code")
        return found


def fault(
    *,
    needs: Iterable[str] = (),
    component: str,
    axes: Iterable[str] = (),
    cause: str,
    any_program: bool = False,
) -> Callable[[Callable[[FaultRun], None]], Fault]:
    """Declare that a function breaks one thing, for ``paralign drill --faults FILE.py``.

    The function is called on every rank after the run has been parallelised and before its first
    step, with a :class:`paralign.prove.fault_run.FaultRun`.

    Args:
        needs: Mesh axes that must have more than one rank, and any of accumulation, padding, clip,
            steps, adamw, gathered_kv, ulysses, tied, untied, whole_head, shared_heads,
            virtual_stages, latent, experts, shared_expert, normalised, scaled_routing,
            balance_loss, router_bias, recompute. A config that lacks one skips the fault.
        component: Where the fault is: data, config, weights, forward, loss, backward, reduction,
            clipping, optimizer or state.
        axes: The mesh axes that a right finding names.
        cause: What a right finding names as the cause, one of those that findings have.
        any_program: The fault uses nothing of paralign's own parallel code. Faults of
            ``--faults`` are always tried on a config with ``program``.

    Raises:
        ConfigError: A word is not one of those that findings have; all are listed.
    """
    wanted, named = frozenset(needs), frozenset(axes)
    problems = [
        f"{key}={word!r} is not a {key} that findings have. {suggest(word, known)}"
        for key, word, known in (("component", component, COMPONENTS), ("cause", cause, CAUSES))
        if word not in known
    ]
    problems += [
        f"axes={word!r} is no mesh axis. {suggest(word, AXES)}" for word in sorted(named - {*AXES})
    ]
    problems += [
        f"needs={word!r} is neither a mesh axis nor a trait. {suggest(word, [*AXES, *TRAITS])}"
        for word in sorted(wanted - {*AXES, *TRAITS})
    ]
    if problems:
        raise ConfigError.from_problems("this fault cannot be declared", problems)

    def declare(breaks: Callable[[FaultRun], None]) -> Fault:
        return Fault(
            name=breaks.__name__,
            breaks=breaks,
            needs=wanted,
            component=component,
            axes=named,
            cause=cause,
            any_program=any_program,
        )

    return declare


def faults_in(module: Any) -> list[Fault]:
    """Return the faults that a module defines, in the order of its text."""
    return [value for value in vars(module).values() if isinstance(value, Fault)]


def load_faults(path: str | Path) -> list[Fault]:
    """Import a user's file and return its faults.

    Raises:
        ConfigError: There is no such file, it cannot be imported, or it declares no fault.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise ConfigError(f"--faults={str(path)!r}: there is no such file.")
    name = f"paralign_faults_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--faults={str(path)!r} is no Python file. Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes in it can be found by name
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"--faults={str(path)!r}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"--faults={str(path)!r}: importing it failed with {type(error).__name__}: {error}"
        ) from error
    found = faults_in(module)
    if not found:
        raise ConfigError(
            f"--faults={str(path)!r} declares no fault. Decorate functions with @pa.fault(...)."
        )
    return [replace(one, any_program=True) for one in found]


def only_fitting(
    faults: Iterable[Fault], config: RunConfig
) -> tuple[list[Fault], list[tuple[Fault, list[str]]]]:
    """Split ``faults`` into those that ``config`` can show, and the others with what it lacks."""
    judged = [(one, one.lacks(config)) for one in faults]
    return [one for one, lacks in judged if not lacks], [
        (one, lacks) for one, lacks in judged if lacks
    ]


def unique(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield ``faults``.

    Raises:
        ConfigError: Two have one name.
    """
    seen: set[str] = set()
    for one in faults:
        if one.name in seen:
            raise ConfigError(f"two faults are called {one.name!r}. Rename one of the functions.")
        seen.add(one.name)
        yield one
