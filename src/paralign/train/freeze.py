"""Parameters that stay as they are, by name, on every rank the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from paralign.errors import ConfigError
from paralign.models.rules import did_you_mean


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let parameters stay as they are: no gradient, no optimizer state and no weight decay.

    Args:
        model: A whole model, before it is cut into stages.
        patterns: Of names of parameters, ``*`` for any text. A tied parameter has two names, and is
            frozen by either.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train; all problems are
            listed.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    problems = [
        f"optimizer.freeze has {pattern!r}, which matches no parameter. "
        f"{did_you_mean(pattern, names)}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    for name, parameter in named:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        problems.append(
            f"optimizer.freeze={list(patterns)} matches every parameter, so nothing would be "
            "trained. Leave some out."
        )
    if problems:
        raise ConfigError.from_problems("cannot freeze parameters", problems)
