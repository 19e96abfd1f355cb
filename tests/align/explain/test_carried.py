from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paralign.align import compare
from paralign.align.trace import Kind
from tests.align.synthetic import toy_step, write_trace

BETAS = (0.9, 0.999)
NAMES = ("layers.0.w", "layers.1.w")


def steps(*, change=lambda moments: None):
    """Return three steps of Adam's first moments; ``change`` edits them before the third."""
    moments = {name: torch.zeros(4, 6, dtype=torch.float64) for name in NAMES}
    history = []
    for number in range(3):
        tensors = toy_step(number)
        for seed, name in enumerate(NAMES):
            generator = torch.Generator().manual_seed(10 * number + seed)
            grad = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            if number == 2:
                change(moments) if seed == 0 else None
            moments[name] = BETAS[0] * moments[name] + (1 - BETAS[0]) * grad
            tensors[Kind.PARAM, name] = tensors[Kind.PARAM, "layers.0.w"]
            tensors[Kind.GRAD, name] = grad
            tensors["moment:exp_avg", name] = moments[name]
            tensors[Kind.PARAM_AFTER, name] = tensors[Kind.PARAM, name] - 1e-3 * moments[name]
        history.append(tensors)
    return history


def told(tmp_path: Path, change):
    right = steps()
    options = {"lr": 1e-3, "betas": list(BETAS), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = {"class": "AdamW", "groups": [{"options": options, "names": list(NAMES)}]}
    write_trace(tmp_path / "ref", right, optimizers=[optimizer])
    write_trace(tmp_path / "par", steps(change=change), mesh={"dp": 2}, optimizers=[optimizer])
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)


def forget(moments):
    for name, value in moments.items():
        moments[name] = torch.zeros_like(value)


def exchange(moments):
    first, second = NAMES
    moments[first], moments[second] = moments[second], moments[first]


def put_back(moments):
    moments[NAMES[0]] = steps()[0]["moment:exp_avg", NAMES[0]].clone()


@pytest.mark.parametrize(
    ("change", "cause", "before"),
    [
        (forget, "missing_contribution", "zeros"),
        (exchange, "wrong_layer", NAMES[1]),
        (put_back, "stale", "step 0"),
    ],
)
def test_the_past_of_a_moment_is_proven(tmp_path: Path, change, cause: str, before: str) -> None:
    report = told(tmp_path, change)
    finding = report.findings[0]
    assert (finding.component, finding.cause) == ("state", cause)
    assert finding.evidence["before"] in {before, *(NAMES if cause == "wrong_layer" else ())}
    assert finding.evidence["eps_after"] < 20 < finding.evidence["eps_before"]


def test_a_past_that_nothing_explains_stays_a_candidate(tmp_path: Path) -> None:
    def shake(moments):
        generator = torch.Generator().manual_seed(99)
        noise = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        moments[NAMES[0]] = moments[NAMES[0]] + noise

    finding = told(tmp_path, shake).findings[0]
    assert finding.cause == "unknown"
    assert "state/stale" in finding.candidates
