"""Reads a published model: a folder with `config.json` and safetensors, in one file or many.

Its tensors are offered under their own names to a model that has those, and under ours to a model
of paralign's, after a look at whether they are exactly those that the model needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path, PurePath

from torch import Tensor

from paralign.align.weights import FileWeights, Weights, whole_box
from paralign.errors import ConfigError
from paralign.layout import Box
from paralign.models.published import Layout
from paralign.weights.folders import CONFIG_FILE, family_of, read_json, read_published
from paralign.weights.translate import Translated

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_DERIVED = ".rotary_emb.inv_freq"  # older versions kept these frequencies; they follow from sizes
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MOST_LINES = 20
_CHUNK = 1 << 24


class PublishedWeights:
    """The tensors of a published model.

    Args:
        folder: Its folder.

    Raises:
        ConfigError: It has no safetensors, or its index does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._files = FileWeights(_files(folder), where=self.where)
        self.shapes: Mapping[str, tuple[int, ...]] = self._files.shapes

    def choose(self, names: Collection[str]) -> Weights:
        """Return the tensors under their own names or under ours, whichever the model has.

        Raises:
            ConfigError: Under ours, ``config.json`` is of a model that paralign cannot compute,
                or tensors are missing, unknown or of another shape; all are listed.
        """
        is_ours = family_of(read_json(self._folder / CONFIG_FILE).get("model_type")) is not None
        if any(name in self.shapes for name in names) or not is_ours:
            return self
        return self.as_ours()

    def as_ours(self) -> Translated:
        """Return the tensors under the names of paralign's model.

        Raises:
            ConfigError: As :meth:`choose`.
        """
        found = read_published(self._folder)
        layout = found.entry.published.layout(found.config, self.shapes, found.raw)
        problems = self._differences(layout, is_tied=bool(found.config.tie_embeddings))
        if problems:
            more = len(problems) - _MOST_LINES
            lines = problems[:_MOST_LINES] + ([f"and {more} more"] if more > 0 else [])
            raise ConfigError.from_problems(
                f"{self._folder} does not have the tensors that its {CONFIG_FILE} asks for", lines
            )
        return Translated(self._files, layout, to="ours")

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor under its own name."""
        return self._files.read(name, box)

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    def _differences(self, layout: Layout, *, is_tied: bool) -> list[str]:
        needed, there = layout.theirs, self.shapes
        problems = [f"{name} is missing" for name in needed if name not in there]
        for name in sorted(set(there) - set(needed)):
            if is_tied and name == _HEAD:
                problems += [] if self._is_copy() else [f"{_HEAD} is not the same as {_EMBEDDING}"]
            elif not name.endswith(_DERIVED):
                problems.append(f"{name} {list(there[name])} is not known")
        for name in sorted(set(there) & set(needed)):
            if there[name] != needed[name]:
                problems.append(f"{name} is {list(there[name])}, not {list(needed[name])}")
            elif (code := self._files.codes[name]) not in _FLOATS:
                problems.append(f"{name} holds {code}, not one of {', '.join(_FLOATS)}")
        for name, parts in layout.by_theirs.items():
            if name in there and any(part.ours.name in layout.zeros for part in parts):
                if bool(self.read(name, whole_box(there[name])).any()):
                    problems.append(
                        f"{name} is not zero, and with bias_update_speed=0 in {CONFIG_FILE} the "
                        "routers have no bias"
                    )
        return problems

    def _is_copy(self) -> bool:
        """Whether the head of a tied pair is the embedding, kept a second time."""
        if self.shapes.get(_EMBEDDING) != self.shapes[_HEAD]:
            return False
        boxes = whole_box(self.shapes[_HEAD]).split(_CHUNK)
        return all(bool((self.read(_HEAD, b) == self.read(_EMBEDDING, b)).all()) for b in boxes)


def _files(folder: Path) -> list[Path]:
    """Return the safetensors of a published model."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f" {pickles[0]} is a pickle, which paralign does not open: save the model with "
            "safetensors."
            if pickles
            else ""
        )
        raise ConfigError(f"{folder} has neither {FILE} nor {INDEX}.{hint}")
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, Mapping) or not placed:
        raise ConfigError(f"{folder / INDEX} has no weight_map.")
    names = sorted({str(name) for name in placed.values()})
    outside = [name for name in names if PurePath(name).name != name or name in ("", "..")]
    missing = [name for name in names if name not in outside and not (folder / name).is_file()]
    problems = [f"{name!r} is not the name of a file in it" for name in outside]
    problems += [f"{name} is not there" for name in missing]
    if problems:
        raise ConfigError.from_problems(f"{folder / INDEX} lists other files", problems)
    return [folder / name for name in names]
