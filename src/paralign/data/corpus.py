"""Finds the files that tokens are read from, and how long each is. Reads no contents; no torch.

The order is fixed: the paths relative to the root, sorted as text. The standard library's own
source is on every machine, so a run needs no download.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paralign.errors import DataError

STDLIB = "stdlib"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files in a fixed order, without those of fewer than two bytes: nothing to predict."""

    name: str
    root: Path
    files: tuple[str, ...]  # relative to root, posix
    num_bytes: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """A short hash of names and lengths: ranks on different machines can compare it."""
        listing = "\n".join(f"{n} {f}" for f, n in zip(self.files, self.num_bytes, strict=True))
        return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]

    def read(self, index: int, start: int, count: int) -> bytes:
        """Return ``count`` bytes of file ``index``, from ``start`` on.

        Raises:
            DataError: The file is gone, unreadable, or shorter than it was.
        """
        path = self.root / self.files[index]
        try:
            with path.open("rb") as file:
                file.seek(start)
                found = file.read(count)
        except OSError as error:
            raise DataError(_unreadable(self.name, path, error)) from None
        if len(found) != count:
            raise DataError(
                f"data.source={self.name!r}: {path} has become shorter than the "
                f"{self.num_bytes[index]} bytes it had when the run began. "
                "Leave the source alone while a run reads it."
            )
        return found


def find_corpus(source: str) -> Corpus:
    """List the files of ``source``: ``stdlib``, or the path of a text file or folder.

    In a folder every regular file counts, at any depth; hidden ones and links to folders do not.

    Raises:
        DataError: It is missing, unreadable, no file or folder, or holds no text.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        listed = sorted(_walk(source, root, suffix=".py"))
    else:
        root, listed = _list_path(source, Path(source).expanduser())
    sized = [(name, size) for name, size in listed if size >= 2]
    if not sized:
        what = "is empty" if len(listed) == 1 else f"holds {len(listed)} files, all empty"
        raise DataError(
            f"data.source={source!r} {what if listed else 'holds no file'}, so there is no text to "
            "predict. Give a text file, a folder of them, or stdlib."
        )
    names, sizes = zip(*sized, strict=True)
    return Corpus(name=source, root=root, files=names, num_bytes=sizes)


def _list_path(source: str, path: Path) -> tuple[Path, list[tuple[str, int]]]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return path, sorted(_walk(source, path))
        if not stat.S_ISREG(status.st_mode):  # before opening: a pipe would wait for a writer
            raise DataError(
                f"data.source={source!r} is neither a file nor a folder. "
                "Give a text file or folder, or stdlib."
            )
        with path.open("rb"):  # one that cannot be opened is found before a rank starts
            return path.parent, [(path.name, status.st_size)]
    except FileNotFoundError:
        raise DataError(
            f"data.source={source!r}: there is no such file or folder (looked in {Path.cwd()}). "
            "Give the path of a text file or folder, or stdlib."
        ) from None
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(_unreadable(source, path, error)) from None


def _walk(source: str, root: Path, *, suffix: str = "") -> Iterator[tuple[str, int]]:
    """Yield relative name and length of every file below ``root``."""

    def fail(error: OSError) -> None:
        raise DataError(_unreadable(source, Path(error.filename), error)) from None

    skipped = {"site-packages", "dist-packages", "__pycache__"} if source == STDLIB else set()
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [d for d in subfolders if d not in skipped and not d.startswith(".")]
        here = Path(folder)
        prefix = "" if here == root else f"{here.relative_to(root).as_posix()}/"
        for name in files:
            if name.startswith(".") or not name.endswith(suffix):
                continue
            try:
                status = (here / name).stat()
            except OSError as error:
                raise DataError(_unreadable(source, here / name, error)) from None
            if stat.S_ISREG(status.st_mode):
                yield f"{prefix}{name}", status.st_size


def _unreadable(source: str, path: Path, error: Exception) -> str:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return (
        f"data.source={source!r}: {path} cannot be read: {reason}. "
        "Make it readable, or give another text file or folder, or stdlib."
    )
