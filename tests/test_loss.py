"""The loss is a sum over valid tokens; pieces of a batch add up to the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paralign.errors import LayoutError
from paralign.loss import (
    IGNORE_INDEX,
    count_valid_tokens,
    shift_labels,
    token_cross_entropy_sum,
)
from paralign.models.registry import find_model
from paralign.testing import run_on_ranks

HALVES = (slice(0, 4), slice(4, 8))


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    yield
    torch.set_num_threads(threads)


def make(rows=3, seq_len=8, vocab=11, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, seq_len, vocab, dtype=torch.float64, generator=generator).mul(3)
    labels = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    labels[0, 3:] = IGNORE_INDEX
    labels[2, :1] = IGNORE_INDEX
    return logits.to(dtype), labels


def test_shifted_labels_are_the_next_tokens():
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    assert shift_labels(tokens).tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert shift_labels(torch.tensor([[5]])).tolist() == [[-100]]


def test_count_is_an_exact_integer_tensor():
    _, labels = make()
    count = count_valid_tokens(labels)
    assert count.dtype == torch.int64 and count.item() == 3 * 8 - 5 - 1
    assert count_valid_tokens(labels, ignore_index=-1).item() == 3 * 8


def test_sum_matches_the_formula():
    logits, labels = make()
    expected = 0.0
    for row in range(3):
        for position in range(8):
            label = int(labels[row, position])
            if label != IGNORE_INDEX:
                scores = logits[row, position]
                expected += float(scores.exp().sum().log() - scores[label])
    assert token_cross_entropy_sum(logits, labels).item() == pytest.approx(expected, rel=1e-14)


def test_gradient_is_softmax_minus_one_hot_on_valid_tokens():
    logits, labels = make()
    logits.requires_grad_()
    token_cross_entropy_sum(logits, labels).backward()
    valid = labels != IGNORE_INDEX
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 11)
    expected = (logits.detach().softmax(-1) - one_hot) * valid.unsqueeze(-1)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-13, atol=1e-15)


def test_pieces_with_uneven_padding_add_up_and_means_of_means_do_not():
    logits, labels = make()
    whole = token_cross_entropy_sum(logits, labels)
    pieces = [(logits[r : r + 1, s], labels[r : r + 1, s]) for r in range(3) for s in HALVES]
    sums = [token_cross_entropy_sum(*piece) for piece in pieces]
    assert sum(part.item() for part in sums) == pytest.approx(whole.item(), rel=1e-14)

    counts = [count_valid_tokens(label).item() for _, label in pieces]
    means = [part.item() / count for part, count in zip(sums, counts, strict=True) if count]
    wrong = sum(means) / len(means)
    assert abs(wrong - whole.item() / sum(counts)) > 1e-2


def test_nothing_valid_is_zero_with_zero_gradients():
    logits, labels = make()
    logits.requires_grad_()
    loss = token_cross_entropy_sum(logits, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not bool(logits.grad.any())


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sum_is_computed_in_float32_at_least(given, computed):
    logits, labels = make(dtype=given)
    loss = token_cross_entropy_sum(logits, labels)
    assert loss.dtype == computed
    assert torch.equal(loss, token_cross_entropy_sum(logits.to(computed), labels))


def test_other_ignore_index():
    logits, labels = make()
    renamed = labels.masked_fill(labels == IGNORE_INDEX, -7)
    assert torch.equal(
        token_cross_entropy_sum(logits, renamed, ignore_index=-7),
        token_cross_entropy_sum(logits, labels),
    )


def test_shapes_that_do_not_belong_together_are_refused():
    logits, labels = make()
    with pytest.raises(LayoutError) as error:
        token_cross_entropy_sum(logits, labels[:, :4])
    assert str(error.value) == (
        "logits of shape (3, 8, 11) do not belong to labels of shape (3, 4): [B, S, V] and [B, S] "
        "are needed. Give the same rows and the same slice of the sequence to both."
    )
    with pytest.raises(LayoutError, match=r"logits of shape \(24, 11\)"):
        token_cross_entropy_sum(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "llama",
            {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 8, "ffn_hidden_size": 6},
        ),
        (
            "pangu_moe",
            {
                "num_heads": 2,
                "hidden_size": 8,
                "ffn_hidden_size": 6,
                "q_lora_rank": 4,
                "kv_lora_rank": 3,
                "qk_nope_head_dim": 2,
                "qk_rope_head_dim": 2,
                "v_head_dim": 3,
            },
        ),
    ],
)
def test_gradients_of_a_model_match_finite_differences(name, sizes):
    entry = find_model(name)
    config = entry.configure("tiny", {**sizes, "num_layers": 1, "vocab_size": 7, "bias": True})
    torch.manual_seed(0)
    model = entry.build(config).double()
    tokens = torch.tensor([[1, 4, 2, 6, 0]])
    labels = shift_labels(tokens)

    def loss() -> Tensor:
        return token_cross_entropy_sum(model(tokens), labels) / count_valid_tokens(labels)

    loss().backward()
    step = 1e-6
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        flat, grad = parameter.detach().view(-1), parameter.grad.view(-1)
        for index in range(0, flat.numel(), max(1, flat.numel() // 5)):
            before = flat[index].item()
            with torch.no_grad():
                flat[index] = before + step
                above = loss().item()
                flat[index] = before - step
                below = loss().item()
                flat[index] = before
            slope = (above - below) / (2 * step)
            assert slope == pytest.approx(grad[index].item(), rel=1e-6, abs=1e-9), parameter_name


def _cut_vocabulary(dtype: torch.dtype) -> tuple[float, float, Tensor, list[str]]:
    """Compare with whole logits; return errors of loss and gradient, NaN's loss and refusals."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, degree = mesh.get_local_rank(), mesh.size()
    logits, labels = make(vocab=12, dtype=dtype)
    labels[1, 0], labels[1, 1] = 0, 11  # both ends of the vocabulary
    whole = logits.clone().requires_grad_()
    expected = token_cross_entropy_sum(whole, labels)
    expected.backward()
    part = logits.chunk(degree, -1)[rank].clone().requires_grad_()
    cut = DTensor.from_local(part, mesh, [Shard(2)])
    loss = token_cross_entropy_sum(cut, labels)
    assert loss.dtype == expected.dtype and not isinstance(loss, DTensor)
    loss.backward()
    assert whole.grad is not None and part.grad is not None
    assert part.grad.dtype == dtype
    grad = whole.grad.chunk(degree, -1)[rank]
    outside = token_cross_entropy_sum(cut.detach(), labels.masked_fill(labels == 0, 12))
    refused = []
    tokens = logits.chunk(degree, 1)[rank]
    for local, placement in ((tokens, Shard(1)), (logits, Replicate())):
        with pytest.raises(LayoutError) as caught:
            wrong = DTensor.from_local(
                local, mesh, [placement], shape=logits.shape, stride=logits.stride()
            )
            token_cross_entropy_sum(wrong, labels)
        refused.append(str(caught.value))
    empty = token_cross_entropy_sum(cut.detach(), torch.full_like(labels, IGNORE_INDEX))
    assert float(empty) == 0.0
    error = float((part.grad - grad).norm() / grad.norm())
    return float((loss - expected).abs() / expected), error, outside.detach(), refused


@pytest.mark.ranks
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_logits_cut_along_the_vocabulary_give_the_loss_of_whole_ones(degree):
    eps = torch.finfo(torch.float64).eps
    for loss, grad, outside, refused in run_on_ranks(_cut_vocabulary, degree, torch.float64):
        assert loss <= 4 * eps
        assert grad <= 4 * eps
        assert outside.isnan()  # a label that is no word of the vocabulary is not hidden
        assert all("must be [Shard(2)]" in message for message in refused)


@pytest.mark.ranks
def test_low_precision_logits_cut_along_the_vocabulary_are_summed_in_float32():
    for loss, grad, _, _ in run_on_ranks(_cut_vocabulary, 2, torch.bfloat16):
        assert loss <= 4 * torch.finfo(torch.float32).eps
        assert grad <= torch.finfo(torch.bfloat16).eps
