"""Checkpoints: written by all ranks at once, complete or not there, and loaded on any mesh.

::

    checkpoints/
      step-00000200/            complete: it has this name only when everything in it is on disk
        state.json              step, config, sizes and checksums of the files beside it
        shard-00001-model-00001-of-00002.safetensors    weights of a rank, by global name
        shard-00001-model-00002-of-00002.safetensors    what its optimizer keeps
      .step-00000300.partial/   being written, or what a killed run has left

The format is torch's distributed checkpoint in safetensors: shards say where they lie in the whole
tensor, so any mesh can read them, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from paralign.errors import TrainingError
from paralign.weights.folders import OPTIMIZER, STATE_FILE, complete_checkpoints

FORMAT = 1

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Return what was saved beside the tensors.

        Raises:
            TrainingError: It cannot be read, or is of another format.
        """
        try:
            state = json.loads((self.path / STATE_FILE).read_text(encoding="utf-8"))
            found = state["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                damaged(self.path, f"{STATE_FILE} cannot be read: {error}")
            ) from None
        if found != FORMAT:
            raise TrainingError(
                f"{self.path} has format={found!r}; this version of paralign reads {FORMAT}. Load "
                "it with the version that wrote it."
            )
        result: dict[str, Any] = state
        return result


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in ``folder``, the newest last."""
    return [Checkpoint(path, step) for step, path in complete_checkpoints(folder)]


class Checkpoints:
    """The checkpoints of a run. Every rank makes one, and all call its methods together.

    Args:
        folder: Where they are; on a file system that all ranks see.
        keep: How many of the newest are kept.
        is_async: Write while training goes on; :meth:`save` then only copies the tensors, into
            memory on the host that stays for the next save.

    Comm:
        A process group of its own, so that what is written in the background does not mix with
        training. A save gathers the plan of every rank on rank 0: some hundred bytes a tensor.
    """

    def __init__(self, folder: Path, *, keep: int, is_async: bool) -> None:
        self._folder = folder
        self._keep = keep
        self._is_async = is_async
        self._group = dist.new_group(backend="gloo")
        # One for all saves: it keeps the memory that it copies into, which is slow to come by.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.accelerator.is_available(),
                use_shared_memory=False,
                use_async_staging=False,  # the next step changes the tensors in place
                use_non_blocking_copy=False,
            )
        )
        self._writing: tuple[int, Any] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Save this rank's ``tensors`` (by global name) and ``state`` (the same on every rank).

        Waits for the save before, if that is still being written.

        Raises:
            TrainingError: That one, or (unless asynchronous) this one, could not be written.
        """
        self.wait()
        if dist.get_rank() == 0:
            self._remove_partial()
        dist.barrier(group=self._group)
        writer = _Writer(self._folder, step, {**state, "step": step}, keep=self._keep)
        arguments: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        if self._is_async:
            arguments["async_stager"] = self._stager
            self._writing = step, async_save(dict(tensors), **arguments)
            return
        try:
            save(dict(tensors), **arguments)
        except CheckpointException as error:
            raise self._not_written(step, error) from None

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            TrainingError: It could not be written; the checkpoints before are untouched.
        """
        if self._writing is None:
            return
        step, future = self._writing
        self._writing = None
        try:
            future.result()
        except CheckpointException as error:
            raise self._not_written(step, error) from None

    def _not_written(self, step: int, error: CheckpointException) -> TrainingError:
        reasons = sorted(
            {f"rank {rank}: {reason(failure)}" for rank, failure in error.failures.items()}
        )
        older = find_checkpoints(self._folder)
        kept = f"the last complete one is {older[-1].path}" if older else "there is none before it"
        return TrainingError(
            f"the checkpoint of step {step} could not be written to {self._folder} "
            f"({'; '.join(reasons)}); {kept}. Make room there, or set train.dir to another disk, "
            "and start the same command again."
        )

    def _remove_partial(self) -> None:
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class _Checked(WriteResult):
    """A result of a rank's write that brings the sizes and checksums of its files along."""

    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class _Writer(HuggingFaceStorageWriter):
    """Writes into a folder that gets its final name when every rank has written its files."""

    def __init__(self, folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> None:
        self._final = folder / f"step-{step:08d}"
        self._partial = folder / f".{self._final.name}.partial"
        self._folder, self._state, self._keep = folder, state, keep
        super().__init__(str(self._partial), save_distributed=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank two files of its own: one for weights, one for the optimizer's."""
        return [
            replace(
                plan,
                storage_data={
                    "shard_index": number,
                    "fqn_to_index_mapping": {
                        item.index.fqn: 2 if item.index.fqn.startswith(OPTIMIZER) else 1
                        for item in plan.items
                    },
                },
            )
            for number, plan in enumerate(plans, 1)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and take their checksums where they have been written."""
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: seal_of(self._partial / name) for name in names}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([_Checked(**vars(result), files=files) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint complete. Runs on one rank, after all others have written."""
        files: dict[str, tuple[int, int]] = {}
        for result in (one for rank in results for one in rank):
            assert isinstance(result, _Checked)  # made by write_data
            files.update(result.files)
        state = {"format": FORMAT, "torch": torch.__version__, **self._state, "files": files}
        with (self._partial / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self._partial.rename(self._final)
        _sync_folder(self._folder)
        for old in find_checkpoints(self._folder)[: -self._keep]:
            # Renamed first, so that none is ever complete by name and empty inside.
            doomed = old.path.rename(self._folder / f".{old.path.name}.old.partial")
            shutil.rmtree(doomed, ignore_errors=True)


def seal_of(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file, by which a later change is seen."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
        return file.tell(), checksum


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Any) -> str:
    """Return what an exception says, without its class; also where the engine wraps it."""
    inner = error[0] if isinstance(error, tuple) else error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)


def damaged(path: Path, what: str) -> str:
    """Return the message about a checkpoint that is not as it was written."""
    return (
        f"{path} is damaged: {what}. Remove that folder to go on from the checkpoint before it, or "
        "restore the files."
    )
