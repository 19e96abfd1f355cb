from __future__ import annotations

import json
import sys

import pytest
from tokenizers import Tokenizer

from paralign.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer
from paralign.errors import DataError
from tests.data.texts import TEXT, write_tokenizer


def test_bytes_are_their_own_tokens():
    tokenizer = open_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocab_size == 256
    assert [tokens.tolist() for tokens in tokenizer.encode([b"\x00ab", b"\xff"])] == [
        [0, 97, 98],
        [255],
    ]


def test_a_json_file_gives_the_tokens_that_its_library_gives(tmp_path):
    path = write_tokenizer(tmp_path / "t.json")
    ours, library = open_tokenizer(str(path)), Tokenizer.from_file(str(path))
    [tokens] = ours.encode([TEXT.encode()])
    assert tokens.tolist() == library.encode(TEXT).ids
    assert len(tokens) < len(TEXT) / 2
    assert ours.vocab_size == library.get_vocab_size()
    assert ours.end is None


def test_truncation_and_special_tokens_of_the_file_are_off(tmp_path):
    path = write_tokenizer(tmp_path / "t.json")
    library = Tokenizer.from_file(str(path))
    whole = library.encode(TEXT).ids
    library.enable_truncation(5)
    library.enable_padding(length=5000)
    library.save(str(path))
    assert open_tokenizer(str(path)).encode([TEXT.encode()])[0].tolist() == whole


def test_gaps_in_the_vocabulary_count(tmp_path):
    path = write_tokenizer(tmp_path / "t.json")
    made = json.loads(path.read_text())
    made["added_tokens"].append(
        made["added_tokens"][0] | {"id": 5000, "content": "<far>", "special": True}
    )
    path.write_text(json.dumps(made))
    library = Tokenizer.from_file(str(path))
    assert open_tokenizer(str(path)).vocab_size == 1 + max(library.get_vocab().values())


def test_the_digest_tells_tokenizers_apart(tmp_path):
    one, two = write_tokenizer(tmp_path / "1.json"), write_tokenizer(tmp_path / "2.json", 262)
    digests = {
        JsonTokenizer(str(one)).digest,
        JsonTokenizer(str(two)).digest,
        JsonTokenizer(str(one), "</s>").digest,
    }
    assert len(digests) == 3


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    for name, said in (
        (tmp_path / "none.json", "cannot be read: no such file"),
        (tmp_path / "t.json", "is no tokenizer"),
    ):
        with pytest.raises(DataError, match=said) as error:
            open_tokenizer(str(name))
        assert f"data.tokenizer={str(name)!r}" in str(error.value)
        assert "or bytes." in str(error.value)


def test_an_unknown_end_token_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "t.json")
    assert open_tokenizer(str(path), "</s>").end == 0
    with pytest.raises(DataError, match=r"data.end_token='<eos>' is no token .* It has </s>\."):
        open_tokenizer(str(path), "<eos>")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'paralign\[tokenizers\]'"):
        open_tokenizer("t.json")
