from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from paralign.config.load import resolve_config
from paralign.config.rules import find_problems
from paralign.errors import ConfigError
from paralign.prove.own_program import _loss_of
from paralign.prove.run import align

SMALL = {
    "model": {
        "name": "llama",
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
    },
    "mesh": {"dp_shard": 2},
    "pipeline": {"num_microbatches": 1},
    "batch": {"global_batch": 4, "seq_len": 8},
    "data": {"padding": 0.5},
    "align": {"dtype": "float64", "steps": 2, "record": "gradients"},
}


def config(program, **sections):
    return resolve_config(
        {**SMALL, "program": f"tests.prove.test_own_program:{program}", **sections}
    )


class DataParallel:
    """Data parallelism by hand, with an optimizer of its own."""

    def __init__(self, model, mesh, run, *, average=False):
        self.model, self.mesh, self.clip_at = model, mesh["dp_shard"], run.optimizer.clip
        self.average = average
        options = run.optimizer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def __call__(self, batch):
        num_tokens = (batch["labels"] != -100).sum()
        rows = {n: t.chunk(2)[self.mesh.get_local_rank()] for n, t in batch.items()}
        logits = self.model(rows["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        self.optimizer.zero_grad()
        (total / num_tokens).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.mesh.get_group())
            if self.average:
                parameter.grad.div_(2)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_at)
        self.optimizer.step()
        return total.detach(), int((rows["labels"] != -100).sum())


def right(model, mesh, run):
    return DataParallel(model, mesh, run)


def averaged(model, mesh, run):
    return DataParallel(model, mesh, run, average=True)


def hides_its_optimizer(model, mesh, run):
    inner = DataParallel(model, mesh, run)
    return lambda batch: inner(batch)


def nothing(model, mesh, run):
    return None


def two_arguments(model, mesh):
    raise AssertionError("never called")


@pytest.mark.ranks
def test_a_step_with_its_own_optimizer_is_judged():
    report = align(config("right"))
    assert report.verdict == "aligned", report.why
    assert {row.step for row in report.tensors} == {0, 1}
    assert report.loss is not None


@pytest.mark.ranks
def test_a_mean_where_a_sum_belongs_is_found_in_it():
    report = align(config("averaged"))
    assert report.verdict == "misaligned"
    (first, *_) = report.findings
    assert (first.cause, first.axes) == ("constant_factor", ["dp_shard"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("hides_its_optimizer", "Set step.optimizer"),
        ("nothing", "Return step"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_fix(program, told):
    with pytest.raises(ConfigError, match=program) as caught:
        align(config(program))
    assert told in str(caught.value)


def test_build_must_take_three_arguments():
    with pytest.raises(ConfigError, match=r"called with\s+\(model, mesh, config\)"):
        config("two_arguments")


def test_the_plan_is_the_users_own():
    run = config(
        "right",
        mesh={"tp": 3, "pp": 5},
        pipeline={"schedule": "DualPipeV", "num_microbatches": 7},
    )
    assert find_problems(run) == []


@pytest.mark.parametrize(
    ("returned", "arguments"),
    [
        (None, None),
        (1.5, {"value": 1.5, "reduction": "mean", "scope": "global"}),
        ((3.0, 2), {"value": 3.0, "tokens": 2, "reduction": "sum", "scope": "local"}),
    ],
)
def test_what_a_step_may_return(returned, arguments):
    assert _loss_of("mine:build", returned) == arguments


@pytest.mark.parametrize("returned", ["1.5", torch.zeros(2), (1.0, 2, 3), {"loss": 1.0}])
def test_what_is_no_loss_is_refused(returned):
    with pytest.raises(ConfigError, match=r"mine:build.*step returned"):
        _loss_of("mine:build", returned)
