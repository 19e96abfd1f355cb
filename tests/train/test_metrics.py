from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paralign.train.metrics import ExpertLoad, Metrics, describe_flops

LINE: dict[str, Any] = {
    "step": 10,
    "loss": 2.5,
    "loss_parts": {"cross_entropy": 2.5, "balance": 0.0},
    "norm": 1.25,
    "lr": 3e-4,
    "num_tokens": 1000,
    "tokens_per_s": 12345.6,
    "flops_per_s": 3.2e12,
    "utilisation": None,
    "peak_memory": 3 * 2**29,
    "pipeline_bubble": None,
    "expert_load": None,
}


def test_a_line_says_what_is_known():
    assert Metrics(**LINE).text(100) == (
        "step 10/100: loss 2.5000, norm 1.25, lr 0.0003, 12,346 tokens/s, 3.2 TFLOP/s, 1.50 GiB"
    )
    load = ExpertLoad(worst=1.5, layer="layers.1.ffn.router", mean=1.25)
    more = {"utilisation": 0.4231, "pipeline_bubble": 0.125, "expert_load": load}
    assert (
        Metrics(**{**LINE, **more})
        .text(100)
        .endswith("3.2 TFLOP/s (42.3% of peak), 1.50 GiB, bubble 12%, busiest expert 1.50x")
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (248_256, "248 kFLOP"), (3.21e15, "3.21 PFLOP")],
)
def test_numbers_are_short(number, text):
    assert describe_flops(number) == text


def test_lines_are_read_without_torch():
    code = "import sys, paralign.train.metrics; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
