"""What a run says of itself: a line of JSON every few steps, and the same as text."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paralign.errors import TrainingError

FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """See :func:`paralign.train.expert_load.expert_loads`.

    Attributes:
        worst: The largest of all layers.
        layer: The router that has it.
        mean: Of all layers.
    """

    worst: float
    layer: str
    mean: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line.

    Attributes:
        step: Optimizer steps made.
        loss: Of the last step, over its global batch.
        loss_parts: What it consists of.
        norm: Gradient norm over all parameters, before clipping.
        lr: Learning rate of the last step.
        num_tokens: Valid tokens trained on since the run began.
        tokens_per_s: All tokens, padding as well, a second since the line before.
        flops_per_s: Operations a second that the model needed, on all devices together; see
            :mod:`paralign.train.flops`.
        utilisation: The same as a share of what the devices can do at most; None: not known.
        peak_memory: Bytes that a rank has taken at most since it began; the largest of all ranks.
        pipeline_bubble: Share of the steps since the line before, from the first message to the
            last, in which ranks did not work on a stage: mean of all ranks. None: one stage.
        expert_load: Tokens of the busiest expert, as a multiple of the mean of its layer, in the
            last step: of the worst layer, and the mean of all. None: there are no experts.
    """

    step: int
    loss: float
    loss_parts: dict[str, float]
    norm: float
    lr: float
    num_tokens: int
    tokens_per_s: float
    flops_per_s: float
    utilisation: float | None
    peak_memory: int
    pipeline_bubble: float | None
    expert_load: ExpertLoad | None

    def text(self, num_steps: int) -> str:
        """Return the line for a terminal."""
        balance = self.loss_parts.get("balance", 0.0)
        extra = f" (balance {balance:.4g})" if balance else ""
        share = "" if self.utilisation is None else f" ({self.utilisation:.1%} of peak)"
        return (
            f"step {self.step}/{num_steps}: loss {self.loss:.4f}{extra}, norm {self.norm:.3g}, "
            f"lr {self.lr:.3g}, {self.tokens_per_s:,.0f} tokens/s, "
            f"{describe_flops(self.flops_per_s)}/s{share}, {self.peak_memory / 2**30:.2f} GiB"
            f"{self._more()}"
        )

    def _more(self) -> str:
        bubble, load = self.pipeline_bubble, self.expert_load
        parts = "" if bubble is None else f", bubble {bubble:.0%}"
        return parts if load is None else f"{parts}, busiest expert {load.worst:.2f}x"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A line about text that is held out.

    Attributes:
        step: Optimizer steps made.
        validation_loss: Cross entropy over all valid tokens that were looked at.
        validation_tokens: How many these are.
    """

    step: int
    validation_loss: float
    validation_tokens: int

    def text(self, num_steps: int) -> str:
        """Return the line for a terminal."""
        return (
            f"step {self.step}/{num_steps}: validation loss {self.validation_loss:.4f} over "
            f"{self.validation_tokens:,} tokens"
        )


class MetricsFile:
    """The lines of a run; one rank writes them.

    Args:
        folder: The run's folder.
        step: Steps that the run goes on from: later lines, of steps that were lost, are removed.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(folder) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".metrics-", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Path(file.name).replace(self._path)

    def write(self, metrics: Metrics | Validation) -> None:
        """Append a line.

        Raises:
            TrainingError: The disk is full, or the file cannot be written.
        """
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(metrics)) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error.strerror}. Make room there, or set "
                "train.dir to another disk; the run goes on from its last checkpoint."
            ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, without one that a killed run has left unfinished."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def describe_flops(number: float) -> str:
    """Return ``"3.2 TFLOP"``."""
    units = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, unit = next((pair for pair in units if number >= pair[0]), (1.0, ""))
    return f"{number / size:.3g} {unit}FLOP"
