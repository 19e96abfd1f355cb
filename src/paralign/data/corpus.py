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
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})  # folders inside

_Listed = tuple[str, int, int]  # relative name, bytes, time of the last change


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files in a fixed order, without those of fewer than two bytes: nothing to predict."""

    name: str
    key: str  # of the config, that names it
    root: Path
    files: tuple[str, ...]  # relative to root, posix
    num_bytes: tuple[int, ...]
    modified: tuple[int, ...]  # nanoseconds since 1970, as the file system says

    @property
    def label(self) -> str:
        """What messages call it."""
        return _label(self.key, self.name)

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
            raise DataError(_unreadable(self.label, path, error)) from None
        if len(found) != count:
            raise DataError(
                f"{self.label}: {path} has become shorter than the "
                f"{self.num_bytes[index]} bytes it had when the run began. "
                "Leave the source alone while a run reads it."
            )
        return found


def find_corpus(source: str, *, key: str = "data.source") -> Corpus:
    """List the files of ``source``: ``stdlib``, or the path of a text file or folder.

    In a folder every regular file counts, at any depth; hidden ones and links to folders do not.

    Args:
        source: What the config says.
        key: Where the config says it, for messages.

    Raises:
        DataError: It is missing, unreadable, no file or folder, or holds no text.
    """
    label = _label(key, source)
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        listed = sorted(_walk(label, root, suffix=".py", skipped=_NOT_STDLIB))
    else:
        root, listed = _list_path(label, Path(source).expanduser())
    sized = [one for one in listed if one[1] >= 2]
    if not sized:
        what = "is empty" if len(listed) == 1 else f"holds {len(listed)} files, all empty"
        raise DataError(
            f"{label} {what if listed else 'holds no file'}, so there is no text to "
            "predict. Give a text file, a folder of them, or stdlib."
        )
    names, sizes, times = zip(*sized, strict=True)
    return Corpus(name=source, key=key, root=root, files=names, num_bytes=sizes, modified=times)


def _list_path(label: str, path: Path) -> tuple[Path, list[_Listed]]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return path, sorted(_walk(label, path))
        if not stat.S_ISREG(status.st_mode):  # before opening: a pipe would wait for a writer
            raise DataError(
                f"{label} is neither a file nor a folder. Give a text file or folder, or stdlib."
            )
        with path.open("rb"):  # one that cannot be opened is found before a rank starts
            return path.parent, [(path.name, status.st_size, status.st_mtime_ns)]
    except FileNotFoundError:
        raise DataError(
            f"{label}: there is no such file or folder (looked in {Path.cwd()}). "
            "Give the path of a text file or folder, or stdlib."
        ) from None
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(_unreadable(label, path, error)) from None


def _walk(
    label: str,
    root: str | Path,
    *,
    suffix: str = "",
    skipped: frozenset[str] = frozenset(),
    prefix: str = "",
) -> Iterator[_Listed]:
    """Yield relative name, length and time of every file below ``root``."""
    # Every check of a config does this, so no path is made of the names of thousands of files.
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in skipped:
                        yield from _walk(
                            label, entry.path, suffix=suffix, skipped=skipped, prefix=f"{name}/"
                        )
                elif entry.name.endswith(suffix):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield name, status.st_size, status.st_mtime_ns
    except OSError as error:
        raise DataError(_unreadable(label, Path(error.filename or root), error)) from None


def _label(key: str, source: str) -> str:
    return f"{key}={source!r}"


def _unreadable(label: str, path: Path, error: Exception) -> str:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return (
        f"{label}: {path} cannot be read: {reason}. "
        "Make it readable, or give another text file or folder, or stdlib."
    )
