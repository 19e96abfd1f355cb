"""Public names of paralign, each imported when it is first used.

``import paralign`` loads neither torch nor pydantic, so a wrong config is refused at once and
recording fits into any image. Two functions share their name with a room of the package,
``pa.align`` and ``pa.parallelize``; there the module itself can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paralign.align.compare import compare as compare
    from paralign.align.fused import Fused as Fused
    from paralign.align.inspect import InspectReport as InspectReport
    from paralign.align.inspect import inspect as inspect
    from paralign.align.record import record as record
    from paralign.align.verdict import Report as Report
    from paralign.blueprint import Batch as Batch
    from paralign.blueprint import Blueprint as Blueprint
    from paralign.config.load import load_config as load_config
    from paralign.config.run import RunConfig as RunConfig
    from paralign.dropout import Dropout as Dropout
    from paralign.errors import AlignError as AlignError
    from paralign.errors import ConfigError as ConfigError
    from paralign.errors import ParalignError as ParalignError
    from paralign.errors import RankError as RankError
    from paralign.mesh import Degrees as Degrees
    from paralign.mesh import build_mesh as build_mesh
    from paralign.parallel.compiled import Compile as Compile
    from paralign.parallel.context import ContextParallel as ContextParallel
    from paralign.parallel.data import FSDP as FSDP
    from paralign.parallel.data import Precision as Precision
    from paralign.parallel.pipeline import Pipeline as Pipeline
    from paralign.parallel.recompute import Recompute as Recompute
    from paralign.parallel.tensor_base import TensorParallel as TensorParallel
    from paralign.parallelize import Context as Context
    from paralign.parallelize import parallelize as parallelize
    from paralign.program import Program as Program
    from paralign.prove.fault import fault as fault
    from paralign.prove.run import align as align
    from paralign.randomness import Init as Init
    from paralign.train.local_shards import on_local_shards as on_local_shards
    from paralign.weights.initial import load_initial as load_initial

__version__ = "0.1.0"

_HOME = {
    "AlignError": "paralign.errors",
    "Batch": "paralign.blueprint",
    "Blueprint": "paralign.blueprint",
    "Compile": "paralign.parallel.compiled",
    "ConfigError": "paralign.errors",
    "Context": "paralign.parallelize",
    "ContextParallel": "paralign.parallel.context",
    "Degrees": "paralign.mesh",
    "Dropout": "paralign.dropout",
    "FSDP": "paralign.parallel.data",
    "Fused": "paralign.align.fused",
    "Init": "paralign.randomness",
    "InspectReport": "paralign.align.inspect",
    "ParalignError": "paralign.errors",
    "Pipeline": "paralign.parallel.pipeline",
    "Precision": "paralign.parallel.data",
    "Program": "paralign.program",
    "RankError": "paralign.errors",
    "Recompute": "paralign.parallel.recompute",
    "Report": "paralign.align.verdict",
    "RunConfig": "paralign.config.run",
    "TensorParallel": "paralign.parallel.tensor_base",
    "align": "paralign.prove.run",
    "build_mesh": "paralign.mesh",
    "compare": "paralign.align.compare",
    "fault": "paralign.prove.fault",
    "inspect": "paralign.align.inspect",
    "load_config": "paralign.config.load",
    "load_initial": "paralign.weights.initial",
    "on_local_shards": "paralign.train.local_shards",
    "parallelize": "paralign.parallelize",
    "record": "paralign.align.record",
}

_TRAINING_HALF = ("paralign.parallel", "paralign.program", "paralign.prove", "paralign.train")

__all__ = sorted([*_HOME, "__version__"])


class _CallableModule(ModuleType):
    """A module that can be called as the public function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOME[name]), name)(*args, **kwargs)


class _Package(ModuleType):
    """The package itself: a submodule that shares a public function's name becomes callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, ModuleType):  # the import system binds a submodule
            value.__class__ = _CallableModule
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paralign' has no attribute {name!r}")
    if _HOME[name].startswith(_TRAINING_HALF):
        # Before the import: on an older torch that would fail with an ImportError of torch's.
        import_module("paralign.requirements").require_torch(feature=f"paralign.{name}")
    value = getattr(import_module(_HOME[name]), name)
    # Where a room has the same name, importing it has bound the callable module already.
    return globals().setdefault(name, value)


sys.modules[__name__].__class__ = _Package
