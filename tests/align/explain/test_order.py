from __future__ import annotations

from pathlib import Path

import torch

from paralign.align.trace import Kind
from tests.align.judging import judge
from tests.align.synthetic import toy_step, with_kind

NAME = "layers.0.w"


def off(seed: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return the toy step with a gradient that is off in no way that has a name."""
    step = toy_step()
    grad = step[Kind.GRAD, NAME]
    noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(seed)).to(grad.dtype)
    return with_kind(step, Kind.GRAD, **{NAME: grad + 0.1 * noise * grad.abs().mean()})


def test_what_first_goes_wrong_at_a_later_step_may_have_been_carried_over(tmp_path: Path) -> None:
    right = toy_step()
    report = judge(tmp_path, [right, off(1)], [right, right])
    finding = report.findings[0]
    assert finding.cause == "unknown"  # nothing on the numbers shows it
    assert any("state/stale" in candidate for candidate in finding.candidates)
    assert finding.separate_by == "record the parameters and optimizer state before step 1"


def test_nothing_is_carried_into_the_first_step(tmp_path: Path) -> None:
    right = toy_step()
    report = judge(tmp_path, [off(1), right], [right, right])
    assert not any("state/stale" in c for f in report.findings for c in f.candidates)


def test_gradients_that_were_not_cleared_keep_the_clipped_ones(tmp_path: Path) -> None:
    def clipped(step: int):
        tensors = toy_step(step)
        for (kind, name), value in list(tensors.items()):
            if kind == Kind.GRAD:
                tensors[Kind.CLIPPED_GRAD, name] = 0.25 * value
        return tensors

    right = [clipped(0), clipped(1)]
    kept = {
        name: value + right[0][Kind.CLIPPED_GRAD, name]
        for (kind, name), value in right[1].items()
        if kind == Kind.GRAD
    }
    report = judge(tmp_path, [right[0], with_kind(right[1], Kind.GRAD, **kept)], right)
    finding = report.findings[0]
    assert (finding.component, finding.cause) == ("state", "stale")
    assert finding.evidence["adds_steps"] == [0]
    assert finding.evidence["eps_after"] < 20 < finding.evidence["eps_before"]


def test_later_steps_follow_from_the_first_that_is_wrong(tmp_path: Path) -> None:
    right = toy_step()
    tripled = with_kind(right, Kind.GRAD, **{NAME: 3 * right[Kind.GRAD, NAME]})
    report = judge(tmp_path, [off(1), tripled], [right, right])
    assert {finding.evidence["step"] for finding in report.findings} == {0}
