"""Traps of torch's pipeline schedules; each is a section of docs/engine.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from paralign.testing import run_on_ranks
from tests.engine.toys import build, error_of, gradient_errors, pipe, reference, wrap_blocks
from tests.engine.traps import EXACT, failure_of, still_there

pytestmark = pytest.mark.ranks


def forwards_of_the_first_step() -> dict[str, int]:
    seen: dict[str, int] = {}
    for kind, static in (("shapes guessed", False), ("shapes given", True)):
        p = pipe(build(), "GPipe", num_microbatches=4, static=static)
        calls: list[int] = []
        p.stages[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        p.step()
        seen[kind] = len(calls)
    return seen  # {"shapes guessed": 5, "shapes given": 4}


def test_the_first_step_runs_an_extra_forward():
    (seen,) = run_on_ranks(forwards_of_the_first_step, 1)
    still_there(
        "the-first-step-runs-an-extra-forward-and-backward",
        broken=seen["shapes guessed"] == 5,
        cured=seen["shapes given"] == 4,
        seen=seen,
    )


def gradients_around_an_evaluation() -> dict[str, float]:
    expected = {name: 2 * grad for name, grad in reference(build()).items()}
    seen: dict[str, float] = {}
    for order in ("step eval step", "eval step step"):  # given shapes make no difference here
        p = pipe(build(), "GPipe", wrap_blocks, num_microbatches=2, static=True)
        for method in order.split():
            p.run(getattr(p.schedule, method))
        seen[order] = max(p.errors(expected).values())  # two steps: twice the gradient
    return seen  # {"step eval step": 0.5, "eval step step": 2e-16}


def test_an_evaluation_between_two_steps_loses_gradients():
    seen = run_on_ranks(gradients_around_an_evaluation, 2)[0]
    still_there(
        "an-evaluation-between-two-steps-clears-the-gradients",
        broken=not seen["step eval step"] <= EXACT,
        cured=seen["eval step step"] <= EXACT,
        seen=seen,
    )


def two_steps_before_the_optimizer() -> dict[str, float]:
    seen: dict[str, float] = {}
    for kind, scale_grads in (("scale_grads", True), ("scale_grads=False", False)):
        p = pipe(build(), "1F1B", scale_grads=scale_grads)
        p.step()
        named = list(p.stages[0].named_parameters())
        twice = {name: 2 * param.grad for name, param in named if param.grad is not None}
        p.step()
        seen[kind] = max(gradient_errors(p.stages, twice).values())
    return seen  # {"scale_grads": 0.375, "scale_grads=False": 0.0}


def test_two_steps_divide_the_first_gradient_twice():
    (seen,) = run_on_ranks(two_steps_before_the_optimizer, 1)
    still_there(
        "gradients-are-divided-by-the-number-of-micro-batches-every-time",
        broken=not seen["scale_grads"] <= EXACT,
        cured=seen["scale_grads=False"] <= EXACT,
        seen=seen,
    )


def refused_micro_batches() -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {}
    for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        build_one = partial(pipe, build(), name, pp=2)
        seen[name] = [m for m in range(1, 8) if error_of(partial(build_one, num_microbatches=m))]
    return seen


def test_some_numbers_of_micro_batches_are_refused():
    seen = run_on_ranks(refused_micro_batches, 2)[0]
    still_there(
        "some-numbers-of-micro-batches-are-refused",
        broken=seen["1F1B"] == [1]
        and seen["DualPipeV"] == [1, 2, 3]
        and seen["Interleaved1F1B"] == [5, 7],
        cured=seen["GPipe"] == seen["LoopedBFS"] == seen["ZBVZeroBubble"] == [],
        seen=seen,
    )


class Positioned(nn.Module):
    """A stage that notes the shape of its keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.shapes.add(tuple(positions.shape))
        y: Tensor = self.linear(x)
        return y


def shapes_of_a_keyword_argument() -> dict[str, set[tuple[int, ...]]]:
    seen: dict[str, set[tuple[int, ...]]] = {}
    x, positions = torch.randn(8, 4, 2), torch.arange(4)  # 8 rows of 4 tokens
    for kind, value in (("[S]", positions), ("[B, S]", positions.expand(8, 4))):
        module = Positioned()
        stage = PipelineStage(module, 0, 1, torch.device("cpu"))
        ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss()).step(x, target=x, positions=value)
        seen[kind] = module.shapes
    return seen  # {"[S]": {(1,)}, "[B, S]": {(2, 4)}}


def test_keyword_arguments_are_cut_on_their_first_dim():
    (seen,) = run_on_ranks(shapes_of_a_keyword_argument, 1)
    still_there(
        "keyword-arguments-are-cut-on-their-first-dim",
        broken=seen["[S]"] == {(1,)},
        cured=seen["[B, S]"] == {(2, 4)},
        seen=seen,
    )


class Transposing(nn.Module):
    """A stage that computes in another layout, as many models do."""

    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.contiguous = contiguous

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.transpose(0, 1)).transpose(0, 1)
        return y.contiguous() if self.contiguous else y


def send_to_the_next_rank(module: nn.Module, lengths: tuple[int, ...] = (4,)) -> str:
    rank = dist.get_rank()  # one stage on each of two ranks
    empty = torch.empty(2, lengths[0], 2, requires_grad=True)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=empty, output_args=empty)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    for length in lengths:
        x = torch.randn(4, length, 2)
        kwargs: dict[str, Any] = {"target": x} if rank == 1 else {}
        schedule.step(*([x] if rank == 0 else []), **kwargs)
    return "ran"


def test_a_stage_output_that_is_not_contiguous_breaks_the_send():
    failure = failure_of(send_to_the_next_rank, 2, Transposing(contiguous=False))
    still_there(
        "a-stage-output-that-is-not-contiguous-cannot-be-sent",
        broken="contiguous" in failure,
        cured=failure_of(send_to_the_next_rank, 2, Transposing(contiguous=True)) == "",
        seen=failure,
    )


def test_another_sequence_length_at_a_later_step_ends_the_run():
    module = Transposing(contiguous=True)
    failure = failure_of(send_to_the_next_rank, 2, module, (4, 8))
    still_there(
        "another-sequence-length-at-a-later-step-ends-the-run",
        broken="SIGABRT" in failure,
        cured=failure_of(send_to_the_next_rank, 2, module, (4, 4)) == "",
        seen=failure,
    )
