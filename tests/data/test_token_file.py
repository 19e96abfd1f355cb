from __future__ import annotations

import json

import pytest

from paralign.data.corpus import find_corpus
from paralign.data.token_build import prepare_tokens
from paralign.data.token_file import TokenFile, dtype_for
from paralign.data.tokenizer import ByteTokenizer
from paralign.errors import DataError
from tests.data.texts import write_documents


@pytest.fixture
def made(tmp_path) -> TokenFile:
    corpus = find_corpus(str(write_documents(tmp_path / "text", 50, 70)))
    return prepare_tokens(corpus, ByteTokenizer(), tmp_path / "tokens")


def test_the_narrowest_numbers_that_hold_the_vocabulary():
    sizes = (256, 257, 65536, 65537)
    assert [dtype_for(size) for size in sizes] == ["|u1", "<u2", "<u2", "<u4"]


def test_tokens_are_mapped_and_not_read_at_once(made):
    assert type(made.tokens).__name__ == "memmap"
    assert made.tokens[:3].tolist() == [0, 1, 2]
    assert made.ends.tolist() == [50, 120]
    made.verify()


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
def test_a_shortened_file_is_refused(made, name):
    path = made.path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name} has \d+ bytes instead of \d+") as error:
        TokenFile(made.path)
    assert "Remove that folder" in str(error.value)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin", "header.json"])
def test_a_missing_file_is_refused(made, name):
    (made.path / name).unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        TokenFile(made.path)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
def test_a_changed_byte_is_found(made, name):
    path = made.path / name
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name} has changed since it was written"):
        TokenFile(made.path).verify()


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 121},
        {"num_documents": 0},
        {"dtype": "<f4"},
        {"dtype": "O"},  # numpy would unpickle
        {"files": 3},
        {"seals": {}},
        {"other": 1},
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused(made, change):
    path = made.path / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"is damaged: header\.json"):
        TokenFile(made.path)
