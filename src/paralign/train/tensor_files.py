"""Writes tensors one after another into safetensors files that other tools read too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from paralign.align.payload_stream import FILE_BYTES, PayloadStream
from paralign.errors import ConfigError

_METADATA = {"format": "pt"}  # readers ask for it


def check_new(path: Path) -> None:
    """Refuse a folder that is there, before anything has been read.

    Raises:
        ConfigError: It is.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already. Give the name of a new folder.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``path`` when the block ends, or goes when it fails.

    Raises:
        ConfigError: ``path`` exists, or cannot be written.
    """
    check_new(path)
    partial = path.absolute().parent / f".{path.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path} cannot be written: {reason}. Give another place.") from None


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, file_bytes: int = FILE_BYTES
) -> dict[str, str]:
    """Write ``tensors`` into ``model.safetensors``, or ``model-00001-of-00002.safetensors``, ...

    Holds one tensor at a time.

    Args:
        folder: Where to.
        tensors: By name; each is written before the next is asked for.
        file_bytes: A file that has become larger is followed by another.

    Returns:
        Name of the file of each tensor.
    """
    placed: dict[str, int] = {}
    number, written = 0, 0
    stream: PayloadStream | None = None
    try:
        for name, tensor in tensors:
            if stream is None or written >= file_bytes or not stream.takes(name, tensor):
                _close(stream)
                number, written = number + 1, 0
                stream = PayloadStream(folder / f"{number}.safetensors", _METADATA)
            stream.add(name, tensor)
            placed[name] = number
            written += tensor.numel() * tensor.element_size()
    except BaseException:
        if stream is not None:
            stream.abandon()
        raise
    _close(stream)
    names = {n: _name(n, number) for n in range(1, number + 1)}
    for n, name in names.items():
        (folder / f"{n}.safetensors").rename(folder / name)
    return {name: names[n] for name, n in placed.items()}


def write_durably(path: Path, text: str) -> None:
    """Write a text file, and have it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _close(stream: PayloadStream | None) -> None:
    if stream is not None:
        stream.close()
        with stream.path.open("rb") as file:
            os.fsync(file.fileno())


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
