"""Losses of the two training examples, on one process and on their meshes.

    python -m bench.train_curves [--steps 300] [--only train_moe] [--draw]

Runs ``paralign train`` itself, one process and then the mesh, and reads what it has written into
``metrics.jsonl``. Writes the losses to docs/training_curves.json and docs/training_curves.svg;
``--draw`` draws what was measured before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench._curve_picture import picture
from paralign.train.metrics import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLES = ("train_llama", "train_moe")
FIRST = 50  # steps in which two float32 runs are still the same to four digits
SIDES = {"one device": ("--set", "mesh={}"), "mesh": ()}
Losses = dict[str, dict[str, list[float]]]


def train(example: str, folder: Path, steps: int, options: Sequence[str]) -> list[float]:
    """Train an example with the command, and return the loss of every step.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    keys = (f"train.dir={folder}", "train.log_every=1", f"train.steps={steps}")
    sets = [part for key in keys for part in ("--set", key)]
    command = [sys.executable, "-m", "paralign", "train", f"examples/{example}.yaml"]
    subprocess.run([*command, *sets, *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def gap(curves: dict[str, list[float]], steps: int) -> float:
    """Return the largest relative distance of the two losses of one of the first steps."""
    pairs = list(zip(curves["float32 one device"], curves["float32 mesh"], strict=True))
    return max(abs(a - b) / abs(a) for a, b in pairs[:steps])


def main() -> None:
    """Train, draw and say how far the curves are apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=EXAMPLES)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    options = parser.parse_args()
    data = ROOT / "docs" / "training_curves.json"
    losses: Losses = json.loads(data.read_text()) if data.exists() else {}
    chosen = [] if options.draw else [options.only] if options.only else list(EXAMPLES)
    for example in chosen:
        losses[example] = {}
        for side, sets in SIDES.items():
            with tempfile.TemporaryDirectory(prefix="paralign-curves-") as folder:
                found = train(example, Path(folder), options.steps, sets)
            losses[example][f"float32 {side}"] = found
            print(f"{example}, {side}: {found[0]:.3f} to {found[-1]:.3f}", flush=True)
        data.write_text(json.dumps(losses, indent=1) + "\n")
    (ROOT / "docs" / "training_curves.svg").write_text(picture(losses, ("float32",)))
    for example, curves in losses.items():
        first, whole = gap(curves, FIRST), gap(curves, len(curves["float32 mesh"]))
        print(f"{example}: largest gap {first:.1e} in the first {FIRST} steps, {whole:.1e} in all")


if __name__ == "__main__":
    main()
