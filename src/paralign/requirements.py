"""What a part of paralign asks of the torch it finds.

The package installs beside any torch from 2.4 on, because recording must fit into a job's existing
image. Everything that starts or shards a run needs more, and asks for it here, in words.
"""

from __future__ import annotations

import re

from paralign.errors import ConfigError

TRAINING_TORCH = "2.13"
"""The oldest torch whose pipeline and FSDP the training half is tested on."""


def require_torch(minimum: str = TRAINING_TORCH, *, feature: str = "parallelize") -> None:
    """Refuse to go on with a torch that is older than ``minimum``.

    Args:
        minimum: ``"major.minor"`` of the oldest torch that will do.
        feature: What needs it, for the message.

    Raises:
        ConfigError: The installed torch is older.
    """
    import torch

    if _release(torch.__version__) < _release(minimum):
        raise ConfigError(
            f"torch={torch.__version__} is too old: {feature} needs torch >= {minimum}. Install it "
            f"with pip install -c constraints.txt 'torch>={minimum}', or only record this run "
            "(paralign.record needs torch >= 2.4) and judge it elsewhere with paralign compare."
        )


def _release(version: str) -> tuple[int, int]:
    """Read ``(major, minor)`` of a version, whatever follows them (``+cpu``, ``a0+git``)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"torch version {version!r} does not start with major.minor.")
    return int(match[1]), int(match[2])
