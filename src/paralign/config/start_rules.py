"""Whether weights to start from are of the model that is asked for.

Tensors have names and shapes, and those are checked when they are read. What they do not show (the
base of rotary frequencies, how scores are normalised) is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paralign.config.parse import show
from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.weights.folders import complete_checkpoints, describe, find_place

_ONLY_TRAINING = ("balance_loss", "bias_update_speed", "dropout", "init_std")


def start_problems(config: RunConfig, model: Any) -> Iterator[str]:
    """Yield what keeps ``model.start_from`` from being the start of this run.

    Args:
        config: The run.
        model: Its hyper-parameters, of a model of paralign's; None: somebody's own.
    """
    source = config.model.start_from
    if source is None:
        return
    if not Path(source).exists():
        # A run that goes on does not look at where it once began.
        if not complete_checkpoints(Path(config.train.dir) / "checkpoints"):
            yield (
                f"model.start_from={source!r}: there is no such folder or file. Give the path of "
                "weights, or null."
            )
        return
    if model is None:
        return
    try:
        found = describe(find_place(source))
    except ConfigError as error:
        yield f"model.start_from={source!r}: {error}"
        return
    if found is None:
        return
    if found.entry.name != config.model.name:
        yield (
            f"model.start_from={source!r} has weights of a {found.entry.name}, and model.name="
            f"{config.model.name}. Use name: {found.entry.name}."
        )
        return
    ours, theirs = _computed(model), _computed(found.config)
    for key in ours:
        if ours[key] != theirs[key]:
            yield (
                f"model.{key}={show(ours[key])}, but model.start_from={source!r} has weights of a "
                f"model with {key}={show(theirs[key])}. Set it to that."
            )


def _computed(model: Any) -> dict[str, Any]:
    """Return what decides which function the model computes."""
    values = {key: value for key, value in asdict(model).items() if key not in _ONLY_TRAINING}
    if values["num_limited_groups"] == values["num_expert_groups"]:
        values["num_limited_groups"] = values["num_expert_groups"] = 1  # they limit nothing
    if all(model.is_moe_layer(layer) for layer in range(model.num_layers)):
        values.pop("ffn_hidden_size")  # no layer has it
    return values
