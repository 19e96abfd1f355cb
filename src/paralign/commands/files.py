"""Writes a command's files: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paralign.errors import ConfigError


def check_writable(option: str, path: Path) -> None:
    """Refuse a place that cannot be written to, before anything has run.

    Raises:
        ConfigError: ``path`` is a folder, or its folder is missing or not writable.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option}={str(path)!r} is a folder. Give the name of a file.")
    if not folder.is_dir():
        raise ConfigError(f"{option}={str(path)!r}: there is no folder {folder}. Make it first.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}={str(path)!r}: {folder} is not writable. Give another place.")


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that nobody ever sees a part of it.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp lets only the owner read; a result is as open as any new file.
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path} cannot be written: {reason}. Give another place.") from None
