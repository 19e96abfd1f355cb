"""Dropout whose mask is a function of what is dropped, not of where or in which order it happens.

One bit is drawn for each (seed, sample, position, module, feature). A sample is a row of the run's
data, numbered in the order of the run: its number tells the step, the micro-batch of an
accumulation and the row in it. Ranks, shards, schedules and recomputations do not enter, so a
parallel run drops what one device drops::

    batch:   samples, positions --token_draws--> draws [B, S]: 64 random bits for each token
    module:  draws, name, features  ----mix----> mask  [B, S, features]

``draws`` travel with the tokens, as positions do, and are cut with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from paralign.errors import ConfigError, DataError, LayoutError
from paralign.randomness import GAMMA, mix_, stream_keys

# A word of 64 random bits decides about four features, 16 bits each: drawing words is most of the
# work.
_PER_WORD = 4
_CELLS = 1 << 16
_LOWEST = -(1 << 15)  # of the 16 bits as a signed number

# Words drawn at once on a CPU: they stay in a core's cache.
_CHUNK = 1 << 15


def token_draws(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
    """Return 64 random bits for each token, which every :class:`Dropout` mixes with its own name.

    Shapes:
        samples: ``[B]`` whole numbers, the number of each row in the order of the run.
        positions: ``[B, S]``, global, in the row.
        returns: ``[B, S]`` int64, on the device of ``positions``.

    Args:
        seed: Of the run.
        samples: Which rows these are.
        positions: Where in the row the tokens are.
    """
    of_rows, of_tokens = stream_keys(seed, "dropout")
    rows = mix_(samples.to(positions.device, torch.int64) * GAMMA + of_rows)
    return mix_(rows.unsqueeze(1) + positions.to(torch.int64) * GAMMA + of_tokens)


class Dropout(nn.Module):
    """Zeroes a share of the features of each token, and scales the others by what is left.

    In evaluation mode, and with ``p=0``, the input is returned as it is.

    Args:
        p: Share that is dropped, from 0 to below 1; in steps of 2**-16.
        width: Features of a token, as on one device. With it a rank of tp knows which of them it
            has.

    Raises:
        ConfigError: ``p`` or ``width`` is out of range.

    Ref:
        Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
        2014. https://jmlr.org/papers/v15/srivastava14a.html
        Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (numbers as functions of
        a counter). https://doi.org/10.1145/2063384.2063405
    """

    def __init__(self, p: float, width: int) -> None:
        super().__init__()
        problems = []
        if not (p == 0 or 1 / _CELLS <= p < 1):
            problems.append(f"p={p!r} must be 0, or at least 2**-16 and below 1")
        if width < 1:
            problems.append(f"width={width} must be at least 1")
        if problems:
            raise ConfigError.from_problems("cannot build a Dropout", problems)
        self.p, self.width = float(p), width
        self._dropped = min(round(p * _CELLS), _CELLS - 1)  # of so many cells
        self._scale = _CELLS / (_CELLS - self._dropped)
        # Plain tensors, and no numbers: a compiled block is the same for every layer.
        self._keys: tuple[Tensor, Tensor] | None = None
        self._part = (0, 1)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"p={self.p}, width={self.width}"

    def called(self, name: str) -> None:
        """Take the module's global name, which makes its masks differ from those of others."""
        of_tokens, of_features = (
            torch.tensor(key, dtype=torch.int64, device="cpu")
            for key in stream_keys(0, f"dropout:{name}")
        )
        self._keys = of_tokens, of_features

    def spread(self, rank: int, degree: int) -> None:
        """Say that the input may be one of ``degree`` parts, of the tokens or of the features.

        The parts are neighbours, in the order of the ranks.
        """
        self._part = (rank, degree)

    def forward(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Drop.

        Shapes (n ranks share the input, see :meth:`spread`):
            x: ``[B, S, width]``; or ``[B, S / n, width]``, or ``[B, S, width / n]``. The first dims
                may be in another order, if they are in ``draws``.
            draws: ``[B, S]``, from :func:`token_draws`: of the batch, as ``draws``.
            returns: as ``x``.

        Comm:
            none. Equal to the same part of one device's result, bit for bit.

        Raises:
            DataError: It was not told which tokens these are.
            LayoutError: ``x`` is none of the above.
            ConfigError: The module has no name.
        """
        if not self.training or not self._dropped:
            return x
        if draws is None:
            raise DataError(
                f"{self} was not told which tokens it is given, so its mask would depend on the "
                "order of calls. Pass it draws: of the batch of a training step, through the "
                "blueprint's context; or call eval() on the model."
            )
        if self._keys is None:
            raise ConfigError(
                f"{self} does not know its global name. Call paralign.dropout.name_dropouts(model) "
                "once; pa.parallelize does it by itself."
            )
        draws, first = self._place(x, draws)
        mask = _dropped(draws, self._keys, first, x.shape[-1], self._dropped)
        return x.masked_fill(mask.to(x.device), 0.0) * self._scale

    def _place(self, x: Tensor, draws: Tensor) -> tuple[Tensor, int]:
        """Return the draws of the tokens of ``x``, and the number of its first feature."""
        rank, degree = self._part
        here, whole = tuple(x.shape), (*draws.shape, self.width)
        cut = [dim for dim in range(len(whole)) if here[dim : dim + 1] != whole[dim : dim + 1]]
        if here == whole:
            return draws, 0
        if len(here) == len(whole) and len(cut) == 1 and here[cut[0]] * degree == whole[cut[0]]:
            size, dim = here[cut[0]], cut[0]
            if dim == draws.ndim:
                return draws, rank * size
            return draws.narrow(dim, rank * size, size), 0
        raise LayoutError(
            f"{self} was given x of shape {list(here)} and draws of shape {list(draws.shape)}, and "
            f"it is shared by {degree} ranks. It takes [B, S, {self.width}] and draws [B, S], or "
            "[S, B] for both; or an equal part of the tokens or of the features."
        )


def optional_dropout(p: float, width: int) -> Dropout | None:
    """Return a dropout, or None where nothing is dropped."""
    return Dropout(p, width) if p else None


def dropped(module: nn.Module | None, x: Tensor, draws: Tensor | None) -> Tensor:
    """Return what ``module``, from :func:`optional_dropout`, leaves of ``x``."""
    return x if module is None else cast(Tensor, module(x, draws))


def named_dropouts(roots: Iterable[nn.Module]) -> dict[str, Dropout]:
    """Return the modules in ``roots``, such as the stages of a rank, that drop something."""
    return {
        name: module
        for root in roots
        for name, module in root.named_modules()
        if isinstance(module, Dropout) and module.p > 0
    }


def name_dropouts(model: nn.Module) -> nn.Module:
    """Tell every :class:`Dropout` of a whole model its name, and return the model."""
    for name, module in named_dropouts([model]).items():
        module.called(name)
    return model


def _dropped(
    draws: Tensor, keys: tuple[Tensor, Tensor], first: int, num: int, cells: int
) -> Tensor:
    """Return ``[B, S, num]`` bool, True: drop, of the features that begin with ``first``."""
    of_tokens, of_features = keys
    first_word, last_word = first // _PER_WORD, (first + num - 1) // _PER_WORD
    words = torch.arange(first_word, last_word + 1, dtype=torch.int64, device=draws.device)
    by_feature = mix_(words * GAMMA + of_features)
    by_token = mix_(draws.flatten() + of_tokens)
    skipped = first - first_word * _PER_WORD

    def decide(some: Tensor) -> Tensor:
        word = mix_(some.unsqueeze(1) + by_feature)
        return word.view(torch.int16).narrow(1, skipped, num) < _LOWEST + cells

    rows = len(by_token)
    if draws.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = max(1, _CHUNK // len(words))
    if rows >= len(by_token):
        mask = decide(by_token)
    else:
        mask = torch.empty(len(by_token), num, dtype=torch.bool)
        for start in range(0, len(by_token), rows):
            mask[start : start + rows] = decide(by_token[start : start + rows])
    return mask.view(*draws.shape, num)


def foreign_dropouts(model: nn.Module) -> list[str]:
    """Return a sentence for every dropout of torch's that would drop something in training."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return [
        f"{name} is an nn.{type(module).__name__} with p={module.p}, whose mask depends on the "
        "rank, on the micro-batches and on the order of calls. Use paralign.Dropout, which is "
        "given the batch's draws (docs/models.md), or p=0"
        for name, module in model.named_modules()
        if isinstance(module, (*kinds, nn.FeatureAlphaDropout)) and module.p and module.training
    ]
