from __future__ import annotations

import os

import pytest

from paralign.data.corpus import find_corpus
from paralign.errors import DataError


def test_stdlib_is_python_source_without_installed_packages():
    corpus = find_corpus("stdlib")
    assert len(corpus.files) > 100
    assert all(name.endswith(".py") for name in corpus.files)
    assert not any("site-packages" in name for name in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)
    assert "ast.py" in corpus.files


def test_listing_is_the_same_each_time_and_its_fingerprint_notices_a_change(tmp_path):
    (tmp_path / "b.txt").write_text("bbb")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("aaaa")
    first = find_corpus(str(tmp_path))
    assert (first.files, first.num_bytes) == (("b.txt", "sub/a.txt"), (3, 4))
    assert find_corpus(str(tmp_path)) == first
    assert find_corpus(str(tmp_path)).fingerprint == first.fingerprint
    (tmp_path / "b.txt").write_text("bbbb")
    assert find_corpus(str(tmp_path)).fingerprint != first.fingerprint


def test_hidden_and_too_short_files_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("xxxx")
    (tmp_path / ".hidden").write_text("xxxx")
    (tmp_path / "one").write_text("x")
    (tmp_path / "two").write_text("xx")
    assert find_corpus(str(tmp_path)).files == ("two",)


def test_links_to_files_count_and_those_to_folders_do_not(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "far").write_text("text")
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "in" / "near").write_text("text")
    (root / "file").symlink_to(tmp_path / "away" / "far")
    (root / "folder").symlink_to(tmp_path / "away")
    assert find_corpus(str(root)).files == ("file", "in/near")
    (root / "in" / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="in/broken cannot be read: no such file"):
        find_corpus(str(root))


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.txt").write_text("text")
    assert find_corpus("~/t.txt").num_bytes == (4,)


def test_read_gives_exactly_the_piece(tmp_path):
    (tmp_path / "t").write_bytes(bytes(range(100)))
    assert find_corpus(str(tmp_path / "t")).read(0, 10, 5) == bytes(range(10, 15))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "there is no such file or folder"),
        (lambda path: path.write_text(""), "is empty"),
        (lambda path: path.mkdir(), "holds no file"),
        (lambda path: os.mkfifo(path), "is neither a file nor a folder"),
    ],
    ids=["missing", "empty", "empty_folder", "fifo"],
)
def test_a_source_without_text(make, reason, tmp_path):
    make(tmp_path / "t")
    with pytest.raises(DataError) as caught:
        # A fifo must be refused without waiting for somebody to write into it.
        find_corpus(str(tmp_path / "t"))
    assert reason in str(caught.value)
    assert f"data.source={str(tmp_path / 't')!r}" in str(caught.value)


def test_a_name_with_a_nul_is_an_error_not_a_crash():
    with pytest.raises(DataError, match="cannot be read"):
        find_corpus("a\0b")


@pytest.mark.parametrize("change", ["shorten", "remove"])
def test_a_file_that_changes_during_the_run_is_noticed(change, tmp_path):
    path = tmp_path / "t"
    path.write_text("x" * 100)
    corpus = find_corpus(str(path))
    if change == "remove":
        path.unlink()
    else:
        path.write_text("x")
    with pytest.raises(DataError, match=r"cannot be read|has become shorter than the 100 bytes"):
        corpus.read(0, 50, 10)
