"""Write what passes through modules into the trace: inputs, outputs, output gradients.

Tensors are written as they pass, because the run may change them in place afterwards; so nothing is
held in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from paralign.align.activations import ActivationWatch, Seen
from paralign.align.module_names import named_modules
from paralign.align.names import NamedParameter
from paralign.align.output_rules import OutputRules
from paralign.align.payload_stream import PayloadStream
from paralign.align.placements import RankAxes, is_dtensor, local_of
from paralign.align.tensor_entry import DTYPE_CODES, Kind, TensorEntry
from paralign.align.trace import RankIndex, TokenMap, rank_stem
from paralign.align.trace_writer import TraceWriter, dtype_name
from paralign.errors import ConfigError
from paralign.layout import whole

ACTIVATIONS = ("inputs", "outputs", "output_grads")
"""What of ``pa.record(what=...)`` is seen while it passes through modules."""

# Names under which models take them, whatever the trace calls them.
_TOKENS = ("tokens", "input_ids", "ids", "idx", "token_ids")
_LABELS = ("labels", "targets", "target", "label", "y")
_POSITIONS = ("positions", "position_ids", "input_pos", "pos_ids")
_CANONICAL = {
    **dict.fromkeys(_TOKENS, "tokens"),
    **dict.fromkeys(_LABELS, "labels"),
    **dict.fromkeys(_POSITIONS, "positions"),
}


class ActivationLog:
    """One rank's inputs, outputs and output gradients.

    Args:
        modules: The model, or the pipeline stages of this rank.
        parameters: Their parameters by global name, which name the modules.
        what: Any of :data:`ACTIVATIONS`.
        pattern: Glob of module names.
        axes: Places DTensors.
        rules: Places what is no DTensor.
        step: Returns the number of the step in progress, or None while nothing is recorded.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[NamedParameter],
        *,
        what: Sequence[str],
        pattern: str,
        axes: RankAxes,
        rules: OutputRules,
        step: Callable[[], int | None],
    ) -> None:
        self._what = [name for name in what if name in ACTIVATIONS]
        self._parameters = parameters
        self._pattern = pattern
        self._axes = axes
        self._rules = rules
        self._modules = list(modules)
        self._step = step
        self._writer: TraceWriter | None = None
        self._watch = self._watch_of(modules)
        self._stream: PayloadStream | None = None
        self._num_files = 0
        self._order = 0
        self._told = 0
        """Calls of :meth:`inputs` in this step; the model's own arguments do not count then."""
        self._heard: set[tuple[int, str]] = set()
        self._grid: dict[int, tuple[int, int]] = {}
        """Rows and positions of each micro-batch, where its tokens were seen."""
        self._last: tuple[Tensor, int, TensorEntry] | None = None
        """What was written last, by its owner and version."""

    def watch_modules(self, modules: Sequence[nn.Module]) -> None:
        """Watch other modules than those that hold the parameters: a copy in another dtype.

        Raises:
            ConfigError: They have no modules in common with the model, so names are not known.
        """
        began = self._writer is not None
        self._watch.stop()
        self._watch = self._watch_of(modules)
        if began and self._what:
            self._watch.start()

    def used_rules(self) -> set[str]:
        """Return the patterns of the rules that match a module, recorded or not."""
        return self._rules.used(
            part.name for root in self._modules for part in named_modules(root, self._parameters)
        )

    def start(self, writer: TraceWriter) -> None:
        """Begin to watch and to write."""
        self._writer = writer
        if self._what:
            self._watch.start()

    def stop(self) -> None:
        """Remove all hooks, and finish the file in progress."""
        self._watch.stop()
        self._close()

    def abandon(self) -> None:
        """Remove all hooks, and the file in progress."""
        self._watch.stop()
        if self._stream is not None:
            self._stream.abandon()
            self._stream = None

    def end_step(self) -> None:
        """Finish the step's last file and begin to count anew."""
        self._close()
        self._watch.new_step()
        self._num_files = self._order = self._told = 0
        self._heard.clear()
        self._grid.clear()
        self._last = None

    def inputs(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        positions: Tensor | None,
        samples: Sequence[int] | Tensor | None,
    ) -> None:
        """Note the inputs of the next micro-batch, or of all micro-batches of the step at once."""
        _check_inputs(tokens, labels, positions, samples)
        step = self._step()
        if step is None or "inputs" not in self._what:
            return
        micro_batch, self._told = self._told, self._told + 1
        if micro_batch == 0:
            self._forget_arguments(step)
        given = {"tokens": tokens, "labels": labels, "positions": positions}
        for name, tensor in given.items():
            if tensor is not None:
                self._note_input(name, tensor.expand_as(tokens), step, micro_batch)
        if samples is not None:
            rows = samples.tolist() if isinstance(samples, Tensor) else samples
            token_map = TokenMap(step, micro_batch, tuple(int(row) for row in rows))
            self._index.token_maps.append(token_map)

    def _watch_of(self, modules: Sequence[nn.Module]) -> ActivationWatch:
        return ActivationWatch(
            [(root, named_modules(root, self._parameters, self._pattern)) for root in modules],
            outputs="outputs" in self._what,
            output_grads="output_grads" in self._what,
            on_call=self._called,
            on_tensor=self._passes,
            on_unseen=self._unseen,
        )

    @property
    def _index(self) -> RankIndex:
        assert self._writer is not None, "nothing is noted before the start"
        return self._writer.index

    def _called(
        self, micro_batch: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        step = self._step()
        if step is None or self._told or (micro_batch, "tokens") in self._heard:
            return
        for name, tensor in _whole_numbers(module, args, kwargs).items():
            key = micro_batch, name
            if key not in self._heard:
                self._heard.add(key)
                if name == "tokens":
                    rows, positions = tensor.shape
                    self._grid[micro_batch] = int(rows), int(positions)
                if "inputs" in self._what:
                    self._note_input(name, tensor, step, micro_batch)

    def _forget_arguments(self, step: int) -> None:
        """What the loop tells counts, not what a first forward was seen to take."""
        self._index.tensors[:] = [
            entry for entry in self._index.tensors if (entry.kind, entry.step) != (Kind.INPUT, step)
        ]

    def _note_input(self, name: str, tensor: Tensor, step: int, micro_batch: int) -> None:
        local = local_of(tensor)
        entry = TensorEntry(
            kind=Kind.INPUT,
            name=name,
            step=step,
            dtype=dtype_name(local.dtype, name),
            shape=tuple(local.shape),
            map=whole(local.shape),
            micro_batch=micro_batch,
            token_dims=(0, 1),
            order=self._next_order(),
        )
        self._keep(entry, local)

    def _passes(self, seen: Seen) -> None:
        step = self._step()
        if step is None:
            return
        tensor = seen.tensor
        if str(tensor.dtype).removeprefix("torch.") not in DTYPE_CODES:
            self._unseen(seen.name, f"a trace cannot hold {tensor.dtype}")
            return
        told = None
        if not is_dtensor(tensor):
            told = self._rules.place(seen.kind, seen.name, tensor)
        placed = self._axes.place(tensor) if told is None else told
        is_placed = told is not None or is_dtensor(tensor)
        entry = TensorEntry(
            kind=seen.kind,
            name=seen.name,
            step=step,
            dtype=dtype_name(tensor.dtype, seen.name),
            shape=placed.shape,
            map=placed.map,
            partial_over=placed.partial_over,
            partial_op=placed.partial_op,
            replicated_over=placed.replicated_over if is_placed else (),
            micro_batch=seen.micro_batch,
            call=seen.call,
            order=self._next_order(),
        )
        grid = self._grid.get(seen.micro_batch)
        if grid is not None and not _may_be_tokens(placed.shape, *grid):
            # Rows that a router has chosen: another number each time, in an order of its own.
            self._index.tensors.append(entry)
        elif self._is_last(tensor) and self._last is not None:
            # A module hands on what its last part returned.
            known = self._last[2]
            self._index.tensors.append(replace(entry, file=known.file, key=known.key))
        else:
            written = self._keep(entry, placed.local)
            self._last = (tensor, tensor._version, written)

    def _is_last(self, tensor: Tensor) -> bool:
        return (
            self._last is not None and self._last[0] is tensor and self._last[1] == tensor._version
        )

    def _keep(self, entry: TensorEntry, local: Tensor) -> TensorEntry:
        """Write a tensor and return its entry, which says where it is."""
        key = f"{entry.kind}:{entry.name}@{entry.micro_batch}.{entry.call}"
        local = local.detach()
        if self._stream is None or not self._stream.takes(key, local):
            self._close()
            name = f"{rank_stem(self._index.rank)}.step{entry.step}.activations{self._num_files}"
            self._num_files += 1
            assert self._writer is not None, "nothing passes before the start"
            path = self._writer.directory / f"{name}.safetensors"
            metadata = {"trace_id": self._index.trace_id, "file": path.name}
            self._stream = PayloadStream(path, metadata)
        self._stream.add(key, local)
        written = replace(entry, file=self._stream.path.name, key=key)
        self._index.tensors.append(written)
        return written

    def _close(self) -> None:
        if self._stream is not None:
            self._index.files[self._stream.path.name] = self._stream.close()
            self._stream = None

    def _next_order(self) -> int:
        self._order += 1
        return self._order - 1

    def _unseen(self, name: str, why: str) -> None:
        note = {"name": name, "why": why}
        if note not in self._index.unseen:
            self._index.unseen.append(note)


def _whole_numbers(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tokens, labels and positions among a module's arguments, each ``[rows, s]``."""
    given = [(name, value) for name, value in _named(module, args, kwargs) if _is_whole(value)]
    found: dict[str, Tensor] = {}
    for name, tensor in given:
        if name in _CANONICAL:
            found.setdefault(_CANONICAL[name], tensor)
    if "tokens" not in found:
        rest = [tensor for name, tensor in given if name not in _CANONICAL and tensor.dim() == 2]
        if not rest:
            return {}
        found["tokens"] = rest[0]
    tokens = found["tokens"]
    if tokens.dim() != 2:
        return {}
    return {
        name: tensor.expand_as(tokens)
        for name, tensor in found.items()
        if tuple(tensor.shape) in (tuple(tokens.shape), tuple(tokens.shape[1:]))
    }


def _named(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    try:
        bound = inspect.signature(module.forward).bind_partial(*args)
        named = list(bound.arguments.items())
    except (TypeError, ValueError):  # forward takes other arguments, or has no signature
        named = [(str(number), value) for number, value in enumerate(args)]
    return [*named, *kwargs.items()]


def _is_whole(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() in (1, 2)
        and not value.is_floating_point()
        and not value.is_complex()
        and str(value.dtype) != "torch.bool"
    )


def _may_be_tokens(shape: Sequence[int], rows: int, positions: int) -> bool:
    """Whether some dim of an output can count the micro-batch's tokens, cut over ranks or not."""

    def fits(size: int, count: int) -> bool:
        return size > 0 and count > 0 and (size % count == 0 or count % size == 0)

    if len(shape) < 2:
        return False
    if len(shape) == 2:
        return fits(shape[0], rows * positions) or tuple(shape) == (rows, positions)
    return any(fits(size, positions) for size in shape[:-1])


def _check_inputs(
    tokens: Tensor,
    labels: Tensor | None,
    positions: Tensor | None,
    samples: Sequence[int] | Tensor | None,
) -> None:
    problems = []
    if tokens.dim() != 2:
        problems.append(f"tokens has shape {tuple(tokens.shape)}, not [rows, positions]")
    for name, tensor in {"tokens": tokens, "labels": labels, "positions": positions}.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            problems.append(f"{name} has dtype={tensor.dtype}. Pass whole numbers")
    for name, tensor in {"labels": labels, "positions": positions}.items():
        fits = (tuple(tokens.shape), tuple(tokens.shape[1:]))
        if tensor is not None and tuple(tensor.shape) not in fits:
            problems.append(
                f"{name} has shape {tuple(tensor.shape)}, but tokens {tuple(tokens.shape)}"
            )
    if samples is not None and len(samples) != len(tokens):
        problems.append(f"samples names {len(samples)} rows, but tokens has {len(tokens)}")
    if problems:
        raise ConfigError.from_problems("rec.inputs cannot take this", problems)
