"""The loss in chunks of the sequence, against the loss of all logits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paralign.parallel.loss_chunks
from examples.own_model import OwnBlueprint, build
from paralign.config.run import FsdpSection, ModelSection, RunConfig
from paralign.errors import ConfigError, LayoutError
from paralign.loss import IGNORE_INDEX, token_cross_entropy_sum
from paralign.parallel.loss_chunks import (
    ChunkedHead,
    checked_epilogue,
    chunk_bounds,
    head_problems,
)
from paralign.parallel.support import Decision, Plan, rules
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics
from tests import parity
from tests.parity import EPS, GRAD_TOLERANCE, PANGU, check_result, make_config, measure_all

ROWS, SEQ_LEN, WIDTH, WORDS = 2, 7, 5, 11


def test_chunks_are_as_even_as_can_be():
    assert chunk_bounds(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert chunk_bounds(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert chunk_bounds(4, 1) == [(0, 4)]
    for wrong in (0, 5):
        with pytest.raises(LayoutError, match=f"loss_chunks={wrong} must be .* at most the 4 tok"):
            chunk_bounds(4, wrong)


def scene(seq_len: int = SEQ_LEN, words: int = WORDS) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, words).double()
    x = torch.randn(ROWS, seq_len, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(words, (ROWS, seq_len))
    labels[0, -3:] = IGNORE_INDEX
    labels[1, 0] = IGNORE_INDEX
    return head, x, labels


def gradients(head: nn.Module, x: Tensor, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss / 3, [x, *head.parameters()]))


@pytest.mark.parametrize("num_chunks", range(1, SEQ_LEN + 1))
def test_loss_and_gradients_are_those_of_all_logits(num_chunks):
    head, x, labels = scene()
    whole = token_cross_entropy_sum(head(x), labels)
    expected = gradients(head, x, whole)
    chunked = ChunkedHead(head, num_chunks)
    loss = chunked.sum_of_losses(lambda: head(x), labels)
    assert loss.item() == pytest.approx(whole.item(), rel=4 * EPS)
    for got, right in zip(gradients(head, x, loss), expected, strict=True):
        assert (got - right).norm() <= 4 * EPS * right.norm()


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


@pytest.mark.parametrize("num_chunks", [2, 4, 5])
def test_no_tensor_is_as_large_as_the_logits(num_chunks):
    head, x, labels = scene(seq_len=40, words=100)
    with LargestTensor() as whole:
        token_cross_entropy_sum(head(x), labels).backward()
    assert whole.numel == ROWS * 40 * 100
    chunked = ChunkedHead(head, num_chunks)
    with LargestTensor() as largest:
        chunked.sum_of_losses(lambda: head(x), labels).backward()
    assert largest.numel == ROWS * 40 * 100 // num_chunks


def test_no_chunk_outlives_its_part_of_the_loss():
    head, x, labels = scene(seq_len=40, words=100)
    chunked = ChunkedHead(head, 4)

    def kept() -> int:
        saved: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.numel() if tensor.numel() % 100 == 0 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = token_cross_entropy_sum(chunked._logits(x), labels)
        whole, saved = max(saved), []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss += chunked.sum_of_losses(lambda: head(x), labels)
        assert whole == ROWS * 40 * 100
        return max(saved, default=0)

    assert kept() < ROWS * 40 * 100 // 4


def test_a_head_outside_of_the_loss_is_refused():
    head, x, _ = scene()
    ChunkedHead(head, 2)
    with pytest.raises(ConfigError, match=r"called outside of the loss.* Use loss_chunks=1"):
        head(x)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda head, x: head(x).float(), "1 times and returns something else"),
        (lambda head, x: head(x) + head(x), "2 times and returns something else"),
        (lambda head, x: (head(x), head(x))[1], "2 times and returns its output"),
        (lambda head, x: F.linear(x, head.weight), "0 times and returns something else"),
    ],
)
def test_an_epilogue_that_does_more_is_refused(change, told):
    head, x, labels = scene()
    assert checked_epilogue(lambda: head(x), head, labels).shape == (ROWS, SEQ_LEN, WORDS)
    with pytest.raises(ConfigError, match=f"calls the module head_name {told}"):
        checked_epilogue(lambda: change(head, x), head, labels)
    assert not head._forward_hooks


def test_an_input_with_the_sequence_first_is_refused():
    head, x, labels = scene()
    with pytest.raises(LayoutError, match=r"shape \(7, 2, 5\), and the labels \(2, 7\).*Transpose"):
        checked_epilogue(lambda: head(x.transpose(0, 1)), head, labels)


def test_a_blueprint_without_a_head_is_refused_with_the_fix():
    model, blueprint = build(), OwnBlueprint()
    asks = "loss_chunks=2"
    assert head_problems(model, blueprint, asks) == []
    blueprint.head_name = None  # type: ignore[assignment]
    [problem] = head_problems(model, blueprint, asks)
    assert "OwnBlueprint does not name it. Set head_name to its name" in problem
    blueprint.head_name = "embedding"
    [problem] = head_problems(model, blueprint, asks)
    assert "head_name='embedding' is in none of epilogue_names=['final_norm', 'lm_head']" in problem
    blueprint.head_name = "lm_head.weight"
    assert "is no module of the model" in head_problems(model, blueprint, asks)[0]


def test_zero_bubble_kinds_tell_that_chunks_are_computed_more_often():
    plan = Plan(schedule="ZBVZeroBubble", pp=2, num_microbatches=4, wrap="root", loss_chunks=3)
    [rule] = rules(plan)
    assert (rule.decision, rule.name) == (Decision.RUN, "zero-bubble loss chunks")
    assert plan.loss_recomputations == 2
    assert Plan(loss_chunks=3).loss_recomputations == 1
    assert Plan(schedule="ZBVZeroBubble").loss_recomputations == 0


LLAMA = parity.BASE["model"]
TIED = {**LLAMA, "tie_embeddings": True}
STEPS = {**parity.BASE["align"], "steps": 3}
# Mesh -> the rest of the configs that one world runs; five chunks never divide the sequence.
CASES: dict[str, list[dict[str, Any]]] = {
    "pp tp": [
        {"pipeline": {"schedule": "1F1B", "num_microbatches": 4}},
        {"tensor": {"sequence_parallel": False}, "model": TIED},
        {"pipeline": {"schedule": "ZBVZeroBubble", "num_microbatches": 4}, "model": PANGU},
    ],
    "cp tp": [{"model": TIED}, {"context": {"ulysses_degree": 1, "load_balance": True}}],
    "pp dp_shard": [
        {"pipeline": {"schedule": kind, "num_microbatches": 4}}
        for kind in ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")
    ],
    "dp_shard cp": [
        {"fsdp": {"wrap": [["embedding", "head"]], "reshard_after_forward": True}, "align": STEPS},
        {"fsdp": {"wrap": [["head"], ["norm", "layers.3"]]}, "align": STEPS, "model": LLAMA},
    ],
}
OWN = {
    "model": ModelSection(
        build="examples.own_model:build", blueprint="examples.own_model:blueprint"
    ),
    "fsdp": FsdpSection(wrap=(("lm_head",), ("blocks.0",))),
}


def configs(mesh: str, chunks: int = 3) -> list[RunConfig]:
    sizes = dict.fromkeys(mesh.split(), 2)
    made = [make_config(mesh=sizes, loss={"chunks": chunks}, **case) for case in CASES[mesh]]
    # Its head is fed a transposed view; it has no plan for tp.
    return made if "tp" in sizes else [*made, made[0].model_copy(update=OWN)]


DAILY = {"pp tp"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", [m if m in DAILY else pytest.param(m, marks=pytest.mark.long) for m in CASES]
)
def test_every_gradient_and_parameter_is_that_of_one_device(mesh):
    for result in measure_all(configs(mesh)):
        check_result(result)


def _slices_of_the_row(x: Tensor, labels: Tensor, chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair a chunk of a rank's part with labels as if the ranks' parts were one after another."""
    size = labels.shape[1] // x.shape[1]
    for start, stop in chunk_bounds(x.shape[1], chunks):
        yield x[:, start:stop], labels[:, start * size : stop * size]


def _without_the_last(x: Tensor, labels: Tensor, chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from list(REAL(x, labels, chunks))[:-1]


REAL = paralign.parallel.loss_chunks._pieces
BROKEN = {"labels": _slices_of_the_row, "chunk": _without_the_last}


def errors_of_broken(name: str, config: RunConfig) -> SimpleNamespace:
    with mock.patch.object(paralign.parallel.loss_chunks, "_pieces", BROKEN.get(name, REAL)):
        program = build_program(config, numerics("float64", config))
        program.step(program.shard(build_data(config).global_batch(0)))
    grads = {n: parity._local(p.grad).clone() for n, p in program.named_parameters()}
    return SimpleNamespace(**{"head": grads["head.weight"], "norm": grads["norm.weight"]})


@pytest.mark.ranks
@pytest.mark.parametrize("name", BROKEN)
def test_labels_of_other_tokens_and_a_lost_chunk_are_seen(name):
    config = make_config(mesh={"tp": 2}, loss={"chunks": 3})
    right = run_on_ranks(errors_of_broken, 2, "nothing", config)
    wrong = run_on_ranks(errors_of_broken, 2, name, config)
    for good, bad in zip(right, wrong, strict=True):
        assert (bad.head - good.head).norm() > 1000 * GRAD_TOLERANCE * good.head.norm()
        assert (bad.norm - good.norm).norm() > 1000 * GRAD_TOLERANCE * good.norm.norm()
