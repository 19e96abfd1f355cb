from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paralign.batch
from paralign.batch import LocalBatch, sequence_positions, shard_batch
from paralign.errors import DataError
from paralign.mesh import Degrees

MESHES = [
    (Degrees(), False),
    (Degrees(pp=2, dp_shard=2, cp=2), False),
    (Degrees(pp=2, dp_shard=2, cp=2), True),
    (Degrees(dp_replicate=2, dp_shard=2, cp=2), False),
    (Degrees(dp_replicate=2, cp=4), True),
    (Degrees(dp_shard=4, tp=2), False),
    (Degrees(cp=8), False),
]


def make_batch(rows: int = 8, seq_len: int = 16, *, padding: bool = True) -> dict[str, Tensor]:
    """Return tokens that are all different, and labels with a hole in every row but one."""
    tokens = torch.arange(rows * seq_len).view(rows, seq_len)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    if padding:
        for row in range(1, rows):
            labels[row, seq_len - row :] = -100
    return {"tokens": tokens, "labels": labels}


def shards(
    batch: Mapping[str, Tensor], degrees: Degrees, *, load_balance: bool = False, m: int = 1
) -> list[LocalBatch]:
    return [
        shard_batch(
            batch, degrees=degrees, rank=rank, num_microbatches=m, load_balance=load_balance
        )
        for rank in range(degrees.world_size)
    ]


def problem_of(batch: Mapping[str, Tensor], *, m: int = 2, load_balance: bool = False) -> str:
    degrees = Degrees(pp=2, dp_shard=2, cp=2)
    with pytest.raises(DataError) as caught:
        shard_batch(batch, degrees=degrees, rank=0, num_microbatches=m, load_balance=load_balance)
    return str(caught.value)


@pytest.mark.parametrize(("degrees", "load_balance"), MESHES, ids=str)
def test_the_shares_of_all_ranks_make_up_the_global_batch(degrees, load_balance):
    batch = make_batch()
    rows, seq_len = batch["tokens"].shape
    counts = torch.zeros(rows, seq_len, dtype=torch.int64)
    whole = {name: torch.full((rows, seq_len), -1) for name in ("tokens", "labels", "positions")}
    for local in shards(batch, degrees, load_balance=load_balance):
        assert {t.shape for t in local.tensors.values()} == {
            (rows // degrees.dp, seq_len // degrees.cp)
        }
        assert {t.dtype for t in local.tensors.values()} == {torch.int64}
        assert all(t.is_contiguous() for t in local.tensors.values())
        # Every token is different, so a token says where it belongs.
        at = local.tensors["tokens"].flatten()
        counts.view(-1)[at] += 1
        for name, tensor in local.tensors.items():
            whole[name].view(-1)[at] = tensor.flatten()
    # pp and tp ranks hold copies, all others different tokens.
    assert counts.unique().tolist() == [degrees.pp * degrees.tp]
    assert torch.equal(whole["tokens"], batch["tokens"])
    assert torch.equal(whole["labels"], batch["labels"])
    assert torch.equal(whole["positions"], torch.arange(seq_len).expand(rows, -1))


@pytest.mark.parametrize(("degrees", "load_balance"), MESHES, ids=str)
def test_tokens_are_counted_once(degrees, load_balance):
    batch = make_batch()
    locals_ = shards(batch, degrees, load_balance=load_balance)
    valid = int((batch["labels"] != -100).sum())
    assert {local.num_global_tokens for local in locals_} == {valid}
    assert sum(local.num_local_tokens for local in locals_) == valid * degrees.pp * degrees.tp
    assert {local.seq_len for local in locals_} == {16}


def test_the_picture_in_the_module_docstring_is_right():
    batch = make_batch(rows=4, seq_len=8)
    tokens = [s.tensors["tokens"] for s in shards(batch, Degrees(dp_shard=2, cp=2))]
    upper, lower = batch["tokens"].chunk(2)
    assert torch.equal(tokens[0], upper[:, :4])
    assert torch.equal(tokens[1], upper[:, 4:])
    assert torch.equal(tokens[2], lower[:, :4])
    assert torch.equal(tokens[3], lower[:, 4:])


def test_rows_of_replicas_are_different():
    degrees = Degrees(dp_replicate=2, dp_shard=2)
    firsts = [int(s.tensors["tokens"][0, 0]) for s in shards(make_batch(), degrees)]
    assert firsts == [0, 32, 64, 96]


def test_balanced_slices_are_one_early_and_one_late_chunk():
    positions = sequence_positions(8, 2, load_balance=True)
    assert [p.tolist() for p in positions] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_labels_are_shifted_before_the_sequence_is_cut():
    batch = {"tokens": make_batch(rows=2, seq_len=8)["tokens"]}
    left, right = shards(batch, Degrees(cp=2))
    # The last label of a slice is the first token of the next.
    assert left.tensors["labels"][:, -1].tolist() == right.tensors["tokens"][:, 0].tolist()
    assert right.tensors["labels"][:, -1].tolist() == [-100, -100]
    assert left.num_global_tokens == 2 * 7


def test_narrow_integers_are_taken():
    batch = {name: t.int() for name, t in make_batch().items()}
    (local,) = shards(batch, Degrees())
    assert torch.equal(local.tensors["tokens"], make_batch()["tokens"])


def test_a_slice_without_valid_labels_is_fine():
    batch = make_batch(rows=4, padding=False)
    batch["labels"][:, 8:] = -100
    left, right = shards(batch, Degrees(cp=2))
    assert (left.num_local_tokens, right.num_local_tokens) == (32, 0)


def test_slices_that_overlap_are_refused(monkeypatch):
    monkeypatch.setattr(
        paralign.batch,
        "split_sequence_indices",
        lambda seq_len, cp, rank, load_balance: torch.arange(seq_len // cp),
    )
    with pytest.raises(DataError) as caught:
        sequence_positions(8, 2, load_balance=False)
    assert str(caught.value) == (
        "the slices of seq_len=8 over axis 'cp' (2 ranks) do not cover every position exactly "
        "once. Use a seq_len that divides."
    )


def test_unshifted_labels_are_refused():
    tokens = make_batch()["tokens"]
    expected = (
        "the global batch cannot be cut: labels equal the tokens at the same positions: they are "
        "not shifted. Leave labels out, or shift them before the batch is cut"
    )
    assert problem_of({"tokens": tokens, "labels": tokens.clone()}) == expected
    padded = tokens.clone()
    padded[:, 10:] = -100
    assert problem_of({"tokens": tokens, "labels": padded}) == expected


def test_rows_of_one_repeated_token_are_no_sign_of_unshifted_labels():
    tokens = torch.arange(8)[:, None].expand(-1, 16)
    labels = tokens.clone()
    labels[:, -1] = -100
    shards({"tokens": tokens, "labels": labels}, Degrees(dp_shard=2, cp=2))


def test_every_label_ignored_is_refused_as_such():
    batch = make_batch()
    assert problem_of({**batch, "labels": torch.full_like(batch["tokens"], -100)}) == (
        "the global batch cannot be cut: every label is -100: there is no token to learn from"
    )
    empty = torch.zeros(8, 0, dtype=torch.int64)
    assert "every label is -100" in problem_of({"tokens": empty})


def test_no_tokens_are_refused():
    rest = (
        "; a global batch needs tokens [rows, sequence]. Pass the same global batch on every "
        "rank: program.shard cuts it."
    )
    assert problem_of({"labels": torch.zeros(4, 4)}) == "tokens has shape None" + rest
    assert problem_of({"tokens": torch.arange(4)}) == "tokens has shape (4,)" + rest


@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_what_is_no_tensor_of_whole_numbers_is_refused(name):
    batch = make_batch()
    assert problem_of({**batch, name: batch[name].float()}) == (
        f"{name} has dtype torch.float32. Pass whole numbers, such as torch.int64."
    )
    listed: Any = {**batch, name: batch[name].tolist()}
    assert problem_of(listed) == (f"{name} is a list. Pass a tensor of whole numbers.")


def test_samples_say_what_is_drawn_for_a_token_and_belong_to_the_fingerprint():
    tokens = torch.arange(24).view(4, 6)
    whole = shard_batch(
        {"tokens": tokens, "samples": torch.arange(8, 12)},
        degrees=Degrees(),
        rank=0,
        num_microbatches=1,
        dropout_seed=3,
    )
    draws = whole.tensors["draws"]
    assert draws.shape == (4, 6) and len(draws.unique()) == 24
    shares = itertools.product(((0, 1), (2, 3)), ((0, 1, 2), (3, 4, 5)))
    for rank, (rows, columns) in enumerate(shares):
        part = shard_batch(
            {"tokens": tokens, "samples": torch.arange(8, 12)},
            degrees=Degrees(dp_shard=2, cp=2),
            rank=rank,
            num_microbatches=1,
            dropout_seed=3,
        )
        assert torch.equal(part.tensors["draws"], draws[list(rows)][:, list(columns)])
        assert part.fingerprint == whole.fingerprint
    other = shard_batch(
        {"tokens": tokens, "samples": torch.arange(4)},
        degrees=Degrees(),
        rank=0,
        num_microbatches=1,
        dropout_seed=None,
    )
    assert "draws" not in other.tensors and other.fingerprint != whole.fingerprint


def test_samples_are_one_number_a_row():
    batch = {"tokens": torch.arange(24).view(4, 6), "samples": torch.arange(3)}
    assert "samples (3,) must be one number for each of 4 rows" in problem_of(batch)


def test_every_problem_of_a_batch_is_said_at_once():
    batch = {
        "tokens": torch.arange(42).view(6, 7),
        "labels": torch.zeros(6, 8, dtype=torch.int64),
        "mask": torch.ones(6, 7),
        "attention": torch.ones(6, 7),
    }
    assert problem_of(batch) == (
        "the global batch cannot be cut:\n"
        "  - keys ['attention', 'mask'] are not used: pass tokens, labels, documents and samples "
        "only\n"
        "  - labels (6, 8) and tokens (6, 7) must have one shape\n"
        "  - 6 rows do not divide over axis 'dp' (2 ranks) times num_microbatches=2. Use a "
        "multiple of 4\n"
        "  - seq_len=7 does not divide over axis 'cp' (2 ranks). Pad the sequence to a multiple of "
        "2, with labels -100"
    )


def test_a_balanced_batch_needs_two_chunks_a_rank():
    assert problem_of(make_batch(seq_len=18), load_balance=True) == (
        "the global batch cannot be cut: seq_len=18 does not divide over axis 'cp' (2 ranks, two "
        "chunks each for load_balance). Pad the sequence to a multiple of 4, with labels -100"
    )


def test_a_batch_without_rows_is_refused():
    assert "0 rows do not divide" in problem_of({"tokens": torch.zeros(0, 8, dtype=torch.int64)})


DOCUMENTS = torch.tensor([[4, 4, 4, 9, 9, 9, 9, 0], [1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("load_balance", [False, True])
def test_documents_are_kept_whole_on_every_rank_of_a_sequence(load_balance):
    batch = {"tokens": torch.arange(16).view(2, 8), "documents": DOCUMENTS}
    for rank, local in enumerate(
        shards(batch, Degrees(dp_shard=2, cp=2), load_balance=load_balance)
    ):
        starts = [[0, 0, 0, 3, 3, 3, 3, 7], [0] * 8][rank // 2]
        assert local.tensors["documents"].tolist() == [starts]
        assert local.tensors["tokens"].shape == (1, 4)
        assert local.num_global_tokens == 2 + 3 + 0 + 7  # the last of a document predicts nothing


def test_labels_that_cross_documents_are_refused():
    tokens = torch.arange(16).view(2, 8)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    text = problem_of({"tokens": tokens, "labels": labels, "documents": DOCUMENTS})
    assert "2 labels cross the end of a document, the first in row 0 at position 2" in text
    assert "must have one shape" in problem_of({"tokens": tokens, "documents": DOCUMENTS[:1]})
    assert "documents has dtype torch.float32" in problem_of(
        {"tokens": tokens, "documents": DOCUMENTS.float()}
    )


def test_the_fingerprint_sees_documents():
    tokens = torch.arange(16).view(2, 8)
    prints = {
        fingerprint({"tokens": tokens}),
        fingerprint({"tokens": tokens, "documents": DOCUMENTS}),
        fingerprint({"tokens": tokens, "documents": DOCUMENTS.roll(1, 0)}),
    }
    assert len(prints) == 3


def fingerprint(batch: Mapping[str, Tensor], degrees: Degrees | None = None) -> int:
    prints = {local.fingerprint for local in shards(batch, degrees or Degrees())}
    assert len(prints) == 1
    return prints.pop()


def test_the_fingerprint_is_that_of_the_whole_batch_on_every_rank():
    degrees = Degrees(pp=2, dp_shard=2, cp=2)
    assert fingerprint(make_batch(), degrees) == fingerprint(make_batch())


@settings(derandomize=True)  # a hash may collide; not on some days only
@given(st.data())
def test_fingerprints_differ_when_one_value_differs(data):
    batch = make_batch(rows=4, seq_len=8, padding=False)
    changed = {name: tensor.clone() for name, tensor in batch.items()}
    name = data.draw(st.sampled_from(["tokens", "labels"]))
    row, column = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    changed[name][row, column] += data.draw(st.integers(1, 1000))
    assert fingerprint(changed) != fingerprint(batch)


def test_fingerprints_differ_when_rows_are_permuted():
    batch = make_batch(padding=False)
    rolled = {name: tensor.roll(1, 0) for name, tensor in batch.items()}
    swapped = {name: tensor.flip(0) for name, tensor in batch.items()}
    assert len({fingerprint(b) for b in (batch, rolled, swapped)}) == 3


def test_sums_of_squared_fingerprints_of_a_million_ranks_are_exact():
    largest = (1 << paralign.batch._FINGERPRINT_BITS) - 1
    assert largest**2 * 2**20 <= 2**53
