"""Turns text into numbers: bytes as they are, or what a ``tokenizers`` JSON file says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paralign.data.rows import NUM_BYTES
from paralign.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = "bytes"


class Tokenizer(Protocol):
    """What a token file needs of a tokenizer."""

    @property
    def digest(self) -> str:
        """Equal where every text becomes the same tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def end(self) -> int | None:
        """The token that ends every document; None: there is none."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of every text, as whole numbers."""
        ...


class ByteTokenizer:
    """One token a byte."""

    digest = BYTES
    vocab_size = NUM_BYTES
    end: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """See :class:`Tokenizer`."""
        import numpy as np

        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class JsonTokenizer:
    """A tokenizer that the ``tokenizers`` library reads from its JSON file.

    Text that is not UTF-8 is read with U+FFFD in place of what cannot be read. No special tokens
    are added but ``end_token``; truncation and padding that the file may ask for are off.

    Args:
        path: The JSON file.
        end_token: A token of it that ends every document; None: none does.

    Raises:
        DataError: The library is not installed, the file is missing or no tokenizer, or has no such
            token.
    """

    def __init__(self, path: str, end_token: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise DataError(
                f"data.tokenizer={path!r} needs the tokenizers library, which is not installed. "
                "Install it with pip install 'paralign[tokenizers]', or use data.tokenizer=bytes."
            ) from None
        try:
            text = Path(path).expanduser().read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise DataError(
                f"data.tokenizer={path!r} cannot be read: {reason}. Give the path of a JSON file "
                "that the tokenizers library has written, or bytes."
            ) from None
        try:
            self._library = Library.from_str(text.decode())
        except Exception as error:  # the library has no exception of its own
            raise DataError(
                f"data.tokenizer={path!r} is no tokenizer: {error}. Give a JSON file that the "
                "tokenizers library has written, or bytes."
            ) from None
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self._size = 1 + max(vocabulary.values(), default=-1)
        self._end = None if end_token is None else _token(path, vocabulary, end_token)
        self._digest = hashlib.sha256(text + b"\0" + repr(end_token).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """See :class:`Tokenizer`."""
        return self._digest

    @property
    def vocab_size(self) -> int:
        """See :class:`Tokenizer`."""
        return self._size

    @property
    def end(self) -> int | None:
        """See :class:`Tokenizer`."""
        return self._end

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """See :class:`Tokenizer`; texts are encoded side by side on all cores."""
        import numpy as np

        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        found = self._library.encode_batch(decoded, add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in found]


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    Raises:
        DataError: It cannot be used; see :class:`JsonTokenizer`.
    """
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name, end_token)


def _token(path: str, vocabulary: dict[str, int], token: str) -> int:
    if token not in vocabulary:
        special = sorted(name for name in vocabulary if name.startswith("<") and name.endswith(">"))
        known = f" It has {', '.join(special[:5])}." if special else ""
        raise DataError(
            f"data.end_token={token!r} is no token of data.tokenizer={path!r}.{known} Give one of "
            "its tokens, or null for none."
        )
    return vocabulary[token]
