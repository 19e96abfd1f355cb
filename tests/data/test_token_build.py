from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from unittest import mock

import pytest
from tokenizers import Tokenizer

import paralign.data.token_build as token_build
from paralign.data.corpus import find_corpus
from paralign.data.token_build import prepare_tokens
from paralign.data.token_file import TokenFile
from paralign.data.tokenizer import ByteTokenizer, open_tokenizer
from paralign.errors import DataError
from tests.data.texts import TEXT, write_documents, write_tokenizer


def prepare(folder: Path, **options) -> TokenFile:
    corpus = find_corpus(str(folder / "text"))
    return prepare_tokens(corpus, ByteTokenizer(), folder / "tokens", **options)


def made_at(file: TokenFile) -> int:
    return (file.path / "tokens.bin").stat().st_mtime_ns


def test_it_holds_every_document_in_order(tmp_path):
    write_documents(tmp_path / "text", 5, 300, 2)
    reports: list[tuple[int, int]] = []
    file = prepare(tmp_path, report=lambda done, total: reports.append((done, total)))
    assert file.tokens.tolist() == [n % 251 for n in range(307)]
    assert file.ends.tolist() == [5, 305, 307]
    assert reports == [(307, 307)]
    assert sorted(p.name for p in file.path.iterdir()) == ["ends.bin", "header.json", "tokens.bin"]


def test_it_is_made_once_and_again_when_the_source_changes(tmp_path):
    text = write_documents(tmp_path / "text", 50, 70)
    first = prepare(tmp_path)
    assert made_at(prepare(tmp_path)) == made_at(first)
    (text / "001").write_bytes(bytes(70))  # as long as before
    second = prepare(tmp_path)
    assert second.fingerprint != first.fingerprint
    assert second.tokens[50:].tolist() == [0] * 70
    assert first.tokens[50] == 50  # who has the old one open keeps it
    (text / "002").write_bytes(bytes(9))
    assert prepare(tmp_path).ends.tolist() == [50, 120, 129]
    (text / "000").unlink()
    assert prepare(tmp_path).ends.tolist() == [70, 79]
    assert len([p for p in (tmp_path / "tokens").iterdir() if p.is_dir()]) == 1


def test_new_times_alone_do_not_make_it_again(tmp_path):
    text = write_documents(tmp_path / "text", 50, 70)
    first = prepare(tmp_path)
    os.utime(text / "000", (1, 1))  # as after a copy
    again = prepare(tmp_path)
    assert made_at(again) == made_at(first)
    assert again.header.files[0][2] == 10**9


def test_another_tokenizer_has_a_file_of_its_own(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    path = write_tokenizer(tmp_path / "t.json")
    corpus = find_corpus(str(tmp_path / "text"))
    files = [
        prepare_tokens(corpus, open_tokenizer(*chosen), tmp_path / "tokens")
        for chosen in (("bytes",), (str(path),), (str(path), "</s>"))
    ]
    assert len({file.path for file in files}) == 3
    ids = Tokenizer.from_file(str(path)).encode(TEXT).ids
    assert files[1].tokens.tolist() == ids
    assert files[2].tokens.tolist() == [*ids, 0]
    assert files[1].header.dtype == "<u2"
    write_tokenizer(path, 262)
    other = prepare_tokens(corpus, open_tokenizer(str(path)), tmp_path / "tokens")
    assert other.tokens.tolist() == Tokenizer.from_file(str(path)).encode(TEXT).ids


def test_long_files_are_cut_at_lines_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(token_build, "_PIECE", 100)
    monkeypatch.setattr(token_build, "_LONGEST", 300)
    monkeypatch.setattr(token_build, "_AT_ONCE", 250)
    lines = "\n".join(f"line {n} of a file" for n in range(100))
    texts = [lines, "word " * 400, "\u20ac" * 1000, "x" * 999]
    path = write_tokenizer(tmp_path / "t.json")
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / str(number)).write_text(text, encoding="utf-8")
    corpus = find_corpus(str(tmp_path / "text"))
    library = Tokenizer.from_file(str(path))
    file = prepare_tokens(corpus, open_tokenizer(str(path)), tmp_path / "tokens")
    begin = 0
    for text, end in zip(texts, file.ends.tolist(), strict=True):
        assert library.decode(file.tokens[begin:end].tolist()) == text
        begin = end
    plain = prepare_tokens(corpus, ByteTokenizer(), tmp_path / "tokens")
    assert plain.tokens.tobytes() == "".join(texts).encode()


def test_documents_of_one_token_are_left_out(tmp_path):
    (tmp_path / "text").mkdir()
    library = Tokenizer.from_file(str(write_tokenizer(tmp_path / "t.json")))
    assert len(library.encode("the").ids) == 1
    for name, text in (("a", "the"), ("b", TEXT), ("c", "the")):
        (tmp_path / "text" / name).write_text(text)
    tokenizer = open_tokenizer(str(tmp_path / "t.json"))
    corpus = find_corpus(str(tmp_path / "text"))
    file = prepare_tokens(corpus, tokenizer, tmp_path / "tokens")
    assert file.tokens.tolist() == library.encode(TEXT).ids
    file.verify()
    (tmp_path / "text" / "b").unlink()
    with pytest.raises(DataError, match="makes no document of two tokens"):
        prepare_tokens(find_corpus(str(tmp_path / "text")), tokenizer, tmp_path / "tokens")


def test_damage_is_refused_and_not_made_again_in_silence(tmp_path):
    write_documents(tmp_path / "text", 50, 70)
    path = prepare(tmp_path).path / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    prepare(tmp_path)  # sizes are right, and nobody has looked inside
    with pytest.raises(DataError, match=r"tokens\.bin has changed"):
        prepare(tmp_path, verify=True)


def _kill_while_writing(folder: Path) -> None:
    def die(*args: object) -> None:
        os._exit(9)

    with mock.patch.object(token_build, "_write", die):
        prepare(folder)


def test_a_kill_leaves_nothing_that_looks_complete(tmp_path):
    write_documents(tmp_path / "text", 50, 70)
    process = multiprocessing.get_context("fork").Process(
        target=_kill_while_writing, args=(tmp_path,)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 9
    [left] = (tmp_path / "tokens").glob(".*.partial")
    assert prepare(tmp_path).ends.tolist() == [50, 120]
    assert not left.exists()


def _prepare_slowly(folder: Path, started: float) -> None:
    make = token_build._make

    def slow(*args, **options) -> None:
        with (folder / "makers").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        make(*args, **options)

    token_build._make = slow
    assert prepare(folder).ends.tolist() == [50, 120]


def test_of_many_processes_one_makes_it_and_the_others_wait(tmp_path):
    write_documents(tmp_path / "text", 50, 70)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_prepare_slowly, args=(tmp_path, time.time())) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "makers").read_text() == "x"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    write_documents(tmp_path / "text", 50, 70)
    (tmp_path / "tokens").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be made: .*data\.token_dir"):
        prepare(tmp_path)
