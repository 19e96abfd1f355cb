"""``pa.load_initial``: fills a model with weights, wherever they are and however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from paralign.align.initial import fill_initial
from paralign.align.name_rules import NameRule
from paralign.align.shard_rules import LayoutRule, ShardRule
from paralign.align.weights import FileWeights, TraceWeights, Weights
from paralign.errors import ConfigError
from paralign.weights.folders import OPTIMIZER, Place, find_place
from paralign.weights.published import PublishedWeights


def load_initial(
    model: nn.Module | Sequence[nn.Module],
    source: str | Path,
    *,
    mesh: Any = None,
    names: NameRule = None,
    shards: ShardRule | None = None,
    layouts: LayoutRule | None = None,
    alone: bool = False,
) -> list[str]:
    """Fill the parameters of ``model`` with stored weights, and the buffers that are among them.

    Every rank reads only what it holds. Values are converted to the dtype of the model's tensors.

    Args:
        model: The model, or the stage modules this rank holds; wrapped and sharded as it will run.
        source: One of

            - a checkpoint of ``paralign train``, a seed checkpoint, or the folder of either run:
              then its newest checkpoint;
            - a published model: ``config.json`` beside ``model.safetensors`` or
              ``model.safetensors.index.json``. A model of paralign's takes it under its own names,
              any other one under those in the files;
            - a ``.safetensors`` file of whole tensors by global name;
            - a trace folder with recorded ``params``: those before the first step.
        mesh: As in :func:`paralign.record`; so are ``names``, ``shards`` and ``layouts``.
        names: Names of the model -> names in ``source``.
        shards: What plain tensors are cut over.
        layouts: The same in full.
        alone: This process loads by itself although it belongs to a process group.

    Returns:
        Names in ``source`` that this rank has not used: those of other stages, or a mistake.

    Comm:
        One all-gather of a small object over the default process group, unless ``alone``.

    Raises:
        ConfigError: A parameter is not in ``source`` or has another shape there; all problems are
            listed and nothing is loaded. Or ``source`` does not fit the model that its
            ``config.json`` describes; or the parameters are kept by DeepSpeed's ZeRO-3.
        TraceError: ``source`` is none of these, or its files are damaged.
    """

    def opened() -> Weights:
        return open_weights(find_place(source))

    return fill_initial(
        model, opened, mesh=mesh, names=names, shards=shards, layouts=layouts, alone=alone
    )


def open_weights(place: Place) -> Weights:
    """Open what lies at a place.

    Raises:
        ConfigError: The files are not complete.
        TraceError: They are damaged, or no weights.
    """
    if place.kind == "file":
        return FileWeights([place.path])
    if place.kind == "published":
        return PublishedWeights(place.path)
    if place.kind == "trace":
        return TraceWeights(place.path)
    files = sorted(place.path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{place.path}: its files are gone.")
    return FileWeights(files, where=str(place.path), leave_out=OPTIMIZER)
