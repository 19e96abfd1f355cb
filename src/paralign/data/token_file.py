"""Tokens of a text on disk, as numbers that are mapped into memory and never unpickled.

::

    stdlib-0f3a.../      made under another name, and given this one when everything is on disk
      header.json        what it was made from, and size and SHA-256 of the files beside it
      tokens.bin         all documents one after another, little-endian, 1, 2 or 4 bytes a token
      ends.bin           int64: where each document ends, counted in tokens
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paralign.errors import DataError

FORMAT = 1
HEADER = "header.json"
TOKENS = "tokens.bin"
ENDS = "ends.bin"
_DTYPES = ("|u1", "<u2", "<u4")
_ENDS_DTYPE = "<i8"
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a token file says of itself.

    Attributes:
        dtype: Of ``tokens.bin``, as numpy spells it.
        num_tokens: Tokens of all documents.
        num_documents: Documents; each has two tokens or more.
        vocab_size: One more than the largest token that there may be.
        tokenizer: Digest of the tokenizer.
        source: What it was made from, as the config names it.
        files: Name, bytes and time of the last change of every file of the source.
        contents: SHA-256 of the contents of all these files.
        seals: Bytes and SHA-256 of ``tokens.bin`` and ``ends.bin``.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    tokenizer: str
    source: str
    files: list[tuple[str, int, int]]
    contents: str
    seals: dict[str, tuple[int, str]]
    format: int = FORMAT

    def text(self) -> str:
        """Return what is in ``header.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"


class TokenFile:
    """The tokens of a source, mapped into memory: read where they are looked at.

    Args:
        path: The folder.

    Attributes:
        header: What the file says of itself.
        tokens: ``[num_tokens]``, all documents one after another.
        ends: ``[num_documents]`` int64, where each document ends.

    Raises:
        DataError: It is damaged: a file is missing or has another size, or the header is not what
            it should be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        for name, (num_bytes, _) in self.header.seals.items():
            found = _size_of(path, name)
            if found != num_bytes:
                raise damaged(path, f"{name} has {found} bytes instead of {num_bytes}")
        # Mapped at once: another process may put a newer file in its place.
        self.tokens = self._map(TOKENS, self.header.dtype, self.header.num_tokens)
        self.ends = self._map(ENDS, _ENDS_DTYPE, self.header.num_documents)

    @property
    def fingerprint(self) -> str:
        """A short hash of the tokens and of where documents end."""
        seals = sorted(self.header.seals.items())
        return hashlib.sha256(repr((self.header.dtype, seals)).encode()).hexdigest()[:16]

    def _map(self, name: str, dtype: str, size: int) -> NDArray[Any]:
        return np.memmap(self.path / name, dtype=dtype, mode="r", shape=(size,))

    def verify(self) -> None:
        """Read everything once and compare it with what was written.

        Raises:
            DataError: It has changed since.
        """
        for name, (_, seal) in self.header.seals.items():
            if seal_of(self.path / name)[1] != seal:
                raise damaged(self.path, f"{name} has changed since it was written")


def read_header(path: Path) -> Header:
    """Return what ``header.json`` in the folder ``path`` says.

    Raises:
        DataError: It cannot be read, or does not fit together.
    """
    try:
        found = json.loads((path / HEADER).read_text(encoding="utf-8"))
        header = Header(
            **{
                **found,
                "files": [(str(n), int(size), int(at)) for n, size, at in found["files"]],
                "seals": {str(n): (int(s), str(h)) for n, (s, h) in found["seals"].items()},
            }
        )
        width = np.dtype(header.dtype).itemsize if header.dtype in _DTYPES else 0
        sizes = {name: num_bytes for name, (num_bytes, _) in header.seals.items()}
        expected = {TOKENS: header.num_tokens * width, ENDS: header.num_documents * 8}
        is_sound = sizes == expected and header.num_documents > 0 and width > 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"{HEADER} cannot be read: {error}") from None
    if not is_sound:
        raise damaged(path, f"{HEADER} does not fit together")
    return header


def dtype_for(vocab_size: int) -> str:
    """Return the narrowest dtype that holds every token."""
    widths = (np.dtype(name).itemsize for name in _DTYPES)
    return next(d for d, w in zip(_DTYPES, widths, strict=True) if vocab_size <= 1 << 8 * w)


def seal_of(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()


def damaged(path: Path, what: str) -> DataError:
    """Return the error about a token file that is not as it was written."""
    return DataError(
        f"the token file {path} is damaged: {what}. Remove that folder: the next run makes it anew."
    )


def _size_of(path: Path, name: str) -> int:
    try:
        return (path / name).stat().st_size
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise damaged(path, f"{name} cannot be read: {reason}") from None
