"""Makes the token file of a source where there is none, or another one than is needed.

One process makes it while others that need it too wait for its lock. It gets its name when it is
complete, so a kill at any moment leaves nothing that looks like one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paralign.data.corpus import Corpus
from paralign.data.token_file import (
    ENDS,
    FORMAT,
    HEADER,
    TOKENS,
    Header,
    TokenFile,
    dtype_for,
    read_header,
    seal_of,
)
from paralign.data.tokenizer import Tokenizer
from paralign.errors import DataError

# A longer file is encoded in pieces that end where a line does, so that memory stays small.
_PIECE = 1 << 20
_LONGEST = 1 << 23  # without the end of a line
_AT_ONCE = 1 << 23  # bytes that are encoded side by side

Report = Callable[[int, int], None]
"""Told how many bytes of how many have been read."""


def prepare_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    report: Report | None = None,
    verify: bool = False,
) -> TokenFile:
    """Return the token file of a source, made now if it is missing or was made of something else.

    It is made anew when files of the source have come, gone or changed, or the tokenizer has. Where
    only times have changed, contents are compared.

    Args:
        corpus: The files.
        tokenizer: What makes tokens of them.
        folder: Where token files are kept.
        report: Told of progress.
        verify: Read what is there once, to find damage that sizes do not show.

    Raises:
        DataError: What is there is damaged, or it cannot be made: a file is unreadable, or the disk
            is full.
    """
    path = folder / _name_of(corpus, tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock") as is_alone:
            if not _is_current(path, corpus, tokenizer):
                if is_alone:
                    _remove_left(path)
                _make(path, corpus, tokenizer, report or _ignore)
                verify = False
            found = TokenFile(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"the token file {path} cannot be made: {reason}. Make room there, or set "
            "data.token_dir to a folder that can be written."
        ) from None
    if verify:
        found.verify()
    return found


def _name_of(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Name by source and tokenizer, so that runs with others do not make each other's anew."""
    key = repr((FORMAT, str(corpus.root.absolute()), corpus.name, tokenizer.digest))
    word = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(corpus.name).name).lstrip(".") or "text"
    return f"{word[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _is_current(path: Path, corpus: Corpus, tokenizer: Tokenizer) -> bool:
    if not path.is_dir():
        return False
    header = read_header(path)
    files = _files(corpus)
    is_same = (header.format, header.tokenizer) == (FORMAT, tokenizer.digest)
    if not is_same or [f[:2] for f in header.files] != [f[:2] for f in files]:
        return False
    if header.files == files:
        return True
    if header.contents != _contents(corpus):
        return False
    # Files were copied or touched: remember their new times, so that this is not asked again.
    _write(path / HEADER, replace(header, files=files).text().encode())
    return True


def _files(corpus: Corpus) -> list[tuple[str, int, int]]:
    return list(zip(corpus.files, corpus.num_bytes, corpus.modified, strict=True))


def _contents(corpus: Corpus) -> str:
    digest = hashlib.sha256()
    for index in range(len(corpus.files)):
        for piece in _chunks(corpus, index):
            digest.update(piece)
    return digest.hexdigest()


def _make(path: Path, corpus: Corpus, tokenizer: Tokenizer, report: Report) -> None:
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        dtype = dtype_for(tokenizer.vocab_size)
        with (partial / TOKENS).open("wb") as file:
            lengths, contents = _write_tokens(file, corpus, tokenizer, dtype, report)
            _sync(file)
        if not lengths:
            raise DataError(
                f"{corpus.label} makes no document of two tokens, so there is nothing "
                "to predict. Give a longer text."
            )
        ends = list(accumulate(lengths))
        _write(partial / ENDS, np.asarray(ends, dtype="<i8").tobytes())
        header = Header(
            dtype=dtype,
            num_tokens=ends[-1],
            num_documents=len(ends),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.digest,
            source=corpus.name,
            files=_files(corpus),
            contents=contents,
            seals={name: seal_of(partial / name) for name in (TOKENS, ENDS)},
        )
        _write(partial / HEADER, header.text().encode())
        partial.chmod(0o777 & ~_umask())
        _put_in_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _put_in_place(partial: Path, path: Path) -> None:
    """Give a complete folder its name; who reads an older one keeps what is mapped."""
    if path.exists():
        old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
        path.rename(old / "old")
        shutil.rmtree(old, ignore_errors=True)
    partial.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tokens(
    file: BinaryIO, corpus: Corpus, tokenizer: Tokenizer, dtype: str, report: Report
) -> tuple[list[int], str]:
    """Write the tokens of all documents; return their lengths, and the digest of what was read.

    A document of less than two tokens has nothing to predict and is left out.
    """
    digest, lengths, num_read, total = hashlib.sha256(), [], 0, sum(corpus.num_bytes)
    end = [] if tokenizer.end is None else [tokenizer.end]
    length, begin = 0, 0  # of the document whose end has not come
    for pieces in _batches(corpus):
        encoded = tokenizer.encode([piece for piece, _ in pieces])
        for tokens, (piece, is_last) in zip(encoded, pieces, strict=True):
            digest.update(piece)
            num_read += len(piece)
            file.write(tokens.astype(dtype).tobytes())
            length += len(tokens)
            if not is_last:
                continue
            file.write(np.asarray(end, dtype=dtype).tobytes())
            length += len(end)
            if length >= 2:
                lengths.append(length)
                begin = file.tell()
            else:
                file.seek(begin)
                file.truncate()
            length = 0
        report(num_read, total)
    return lengths, digest.hexdigest()


def _batches(corpus: Corpus) -> Iterator[list[tuple[bytes, bool]]]:
    """Yield pieces of text, many at once, each with whether its document ends with it."""
    waiting: list[tuple[bytes, bool]] = []
    size = 0
    for index in range(len(corpus.files)):
        for piece in _pieces(corpus, index):
            waiting.append(piece)
            size += len(piece[0])
            if size >= _AT_ONCE:
                yield waiting
                waiting, size = [], 0
    if waiting:
        yield waiting


def _pieces(corpus: Corpus, index: int) -> Iterator[tuple[bytes, bool]]:
    rest, left = b"", corpus.num_bytes[index]
    for chunk in _chunks(corpus, index):
        rest, left = rest + chunk, left - len(chunk)
        if not left:
            yield rest, True
        elif at := _cut_at(rest):
            yield rest[:at], False
            rest = rest[at:]


def _cut_at(text: bytes) -> int:
    """Return where to cut a long text: behind a line, or a word, or at least a character."""
    if (at := text.rfind(b"\n") + 1) or len(text) < _LONGEST:
        return at
    if at := text.rfind(b" ") + 1:
        return at
    at = len(text)
    while at > len(text) - 4 and text[at - 1] & 0xC0 == 0x80:  # inside a UTF-8 character
        at -= 1
    return at - 1


def _chunks(corpus: Corpus, index: int) -> Iterator[bytes]:
    size = corpus.num_bytes[index]
    for start in range(0, size, _PIECE):
        yield corpus.read(index, start, min(_PIECE, size - start))


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock that other processes wait for; yield False where the file system has none."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True  # closing the file gives the lock back


def _remove_left(path: Path) -> None:
    """Remove what killed processes have left; whoever makes one now would hold the lock."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(content)
        _sync(file)
    part.replace(path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _ignore(done: int, total: int) -> None:
    """Report to nobody."""
