"""Learning rates over a run: a warm-up, then constant, cosine, or stable and decaying. No torch.

::

    constant   /-----------      cosine   /--.          wsd   /--------.
              /                          /    `-._           /          `-_
             w                          w         min       w       decay   min

Ref:
    cosine: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.
    https://arxiv.org/abs/1608.03983 (one cycle)
    wsd: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with Scalable
    Training Strategies", 2024. https://arxiv.org/abs/2404.06395 (linear decay)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A function of the step alone, so that a resumed run needs no state of it.

    Attributes:
        name: Shape after the warm-up.
        num_steps: Steps of the whole run.
        warmup_steps: Steps over which the rate grows linearly to its full value.
        decay_steps: Last steps in which ``wsd`` decays.
        min_ratio: Share of the full rate that the last step has.
    """

    name: Literal["constant", "cosine", "wsd"] = "constant"
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.0

    def factor(self, step: int) -> float:
        """Return the share of the full learning rate that ``step``, counted from 0, has."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        first = self.warmup_steps if self.name == "cosine" else self.num_steps - self.decay_steps
        share = min(1.0, max(0.0, (step - first + 1) / max(1, self.num_steps - first)))
        kept = (1 + math.cos(math.pi * share)) / 2 if self.name == "cosine" else 1 - share
        return self.min_ratio + (1 - self.min_ratio) * kept
