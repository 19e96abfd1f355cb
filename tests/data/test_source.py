from __future__ import annotations

from collections import Counter

import pytest
import torch

from paralign.data.corpus import Corpus
from paralign.data.source import IGNORED, NUM_BYTES, TokenSource, byte_source
from paralign.errors import DataError
from paralign.loss import IGNORE_INDEX


def rows_of(source: TokenSource, num_batches: int) -> list[tuple[list[int], list[int]]]:
    rows = []
    for step in range(num_batches):
        batch = source.global_batch(step)
        tokens, labels = batch["tokens"].tolist(), batch["labels"].tolist()
        rows += list(zip(tokens, labels, strict=True))
    return rows


def test_ignored_is_what_the_loss_ignores():
    assert IGNORED == IGNORE_INDEX


def test_a_batch_has_the_promised_form():
    source = byte_source("stdlib", global_batch=4, seq_len=32)
    batch = source.global_batch(0)
    assert batch.pop("samples").tolist() == [0, 1, 2, 3]
    assert source.global_batch(3)["samples"].tolist() == [12, 13, 14, 15]
    assert set(batch) == {"tokens", "labels"}
    for value in batch.values():
        assert value.shape == (4, 32)
        assert value.dtype == torch.int64
        assert value.device.type == "cpu"
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < NUM_BYTES
    assert (batch["labels"] != IGNORED).any(dim=1).all()


def test_batches_depend_on_source_seed_and_step_only():
    def batch(seed: int, step: int, padding: float = 0.3) -> dict[str, torch.Tensor]:
        made = byte_source("stdlib", global_batch=4, seq_len=32, seed=seed, padding=padding)
        return made.global_batch(step)

    for key in ("tokens", "labels"):
        assert torch.equal(batch(0, 3)[key], batch(0, 3)[key])
        assert not torch.equal(batch(0, 3)[key], batch(0, 4)[key])
        assert not torch.equal(batch(0, 3)[key], batch(1, 3)[key])


def test_rows_cover_the_text_once_and_labels_are_the_next_byte(tmp_path):
    # 10 and 8 bytes in rows of 4: the last byte of a file is a label only.
    (tmp_path / "a").write_bytes(bytes(range(10, 20)))
    (tmp_path / "b").write_bytes(bytes(range(30, 38)))
    source = byte_source(str(tmp_path), global_batch=1, seq_len=4)
    assert source.num_rows == 5
    assert sorted(rows_of(source, 5)) == [
        ([10, 11, 12, 13], [11, 12, 13, 14]),
        ([14, 15, 16, 17], [15, 16, 17, 18]),
        ([18, 19, 0, 0], [19, IGNORED, IGNORED, IGNORED]),
        ([30, 31, 32, 33], [31, 32, 33, 34]),
        ([34, 35, 36, 37], [35, 36, 37, IGNORED]),
    ]


def test_a_file_that_ends_with_its_row_has_no_row_without_a_label(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(9)))
    source = byte_source(str(tmp_path / "a"), global_batch=1, seq_len=4)
    assert sorted(rows_of(source, 2)) == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]


@pytest.mark.parametrize("num_bytes", [2, 3, 48, 64, 65, 97])
def test_every_epoch_serves_every_row_once_in_another_order(num_bytes, tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(num_bytes)))
    source = byte_source(str(tmp_path / "a"), global_batch=1, seq_len=2)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * source.num_rows, (epoch + 1) * source.num_rows)
        served = [tuple(source.global_batch(step)["tokens"][0].tolist()) for step in steps]
        assert set(Counter(served).values()) == {1}
        epochs.append(served)
    if source.num_rows > 10:
        assert epochs[0] != epochs[1] != epochs[2]


def test_padding_masks_uneven_tails():
    source = byte_source("stdlib", global_batch=16, seq_len=64, padding=0.5)
    plain = byte_source("stdlib", global_batch=16, seq_len=64)
    padded, whole = source.global_batch(0), plain.global_batch(0)
    tails = []
    for row in range(16):
        valid = padded["labels"][row] != IGNORED
        # What is not masked is what it was, and the mask is one run at the end of the row.
        assert torch.equal(padded["labels"][row][valid], whole["labels"][row][valid])
        assert torch.equal(padded["tokens"][row][valid], whole["tokens"][row][valid])
        num_valid = int(valid.sum())
        assert valid[:num_valid].all()
        tails.append(int((whole["labels"][row] != IGNORED).sum()) - num_valid)
    assert len(set(tails)) > 4
    assert 0 <= min(tails) and max(tails) <= 32


def test_every_row_keeps_a_label_however_short_it_is_and_large_the_padding(tmp_path):
    for length in range(2, 40):
        (tmp_path / f"{length:02}").write_bytes(bytes(length))
    source = byte_source(str(tmp_path), global_batch=16, seq_len=8, padding=0.99)
    for step in range(8):
        labels = source.global_batch(step)["labels"]
        assert int((labels != IGNORED).sum(dim=1).min()) >= 1


def test_only_the_rows_that_are_served_are_read(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(200) * 1000)
    source = byte_source(str(tmp_path / "a"), global_batch=2, seq_len=8)
    read: list[int] = []
    original = Corpus.read

    def count(corpus, index, start, num_bytes):
        read.append(num_bytes)
        return original(corpus, index, start, num_bytes)

    monkeypatch.setattr(Corpus, "read", count)
    source.global_batch(5)
    assert read == [9, 9]


def test_too_short_text_names_what_it_makes(tmp_path):
    (tmp_path / "a").write_text("x" * 17)
    byte_source(str(tmp_path / "a"), global_batch=2, seq_len=8)
    with pytest.raises(
        DataError, match=r"holds 17 bytes in 1 file, which makes 2 rows of seq_len=8"
    ):
        byte_source(str(tmp_path / "a"), global_batch=3, seq_len=8)


def test_all_wrong_arguments_are_listed():
    with pytest.raises(DataError) as caught:
        byte_source("stdlib", global_batch=0, seq_len=-1, padding=float("nan"))
    for text in ("global_batch=0", "seq_len=-1", "padding=nan"):
        assert text in str(caught.value)
