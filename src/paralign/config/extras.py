"""Optional packages that a run asks for. Needs none of them, and no torch."""

from __future__ import annotations

from importlib.util import find_spec

from paralign.config.run import RunConfig


def missing_packages(config: RunConfig) -> list[str]:
    """Return what training asks for and is not installed, one sentence each."""
    section = config.metrics
    asked = {
        "tensorboard": "metrics.tensorboard=true" if section.tensorboard else None,
        "wandb": f"metrics.wandb={section.wandb!r}" if section.wandb is not None else None,
    }
    return [
        f"{key} needs the package {name}, which is not installed. Install it with pip install "
        f"'paralign[{name}]', or remove {key.partition('=')[0]}."
        for name, key in asked.items()
        if key is not None and find_spec(name) is None
    ]
