"""Compare synthetic runs: what most tests of the comparison share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paralign.align import Report, compare, trace
from paralign.align.trace import Kind
from paralign.align.verdict import TensorRow
from tests.align.synthetic import toy_step, write_trace

SCHEMAS = Path(trace.__file__).parent / "schema"
MESH = {"dp": 2, "cp": 2}


def sharded(name: str) -> Any:
    return {
        "embed.weight": (Shard(0), Replicate()),
        "layers.0.w": (_StridedShard(1, split_factor=2), Shard(1)),
    }.get(name, (Replicate(), Replicate()))


def check_schema(report: Report) -> None:
    schema = json.loads((SCHEMAS / "report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(report.to_json()))


def check_trace(folder: Path) -> None:
    schema = json.loads((SCHEMAS / "trace.schema.json").read_text())
    for path in folder.glob("*.json"):
        jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_text()))


def judge(tmp_path: Path, parallel: Any, reference: Any = None, **options: Any) -> Report:
    """Compare a sharded run of ``parallel`` tensors with a reference on one device."""
    write_trace(tmp_path / "ref", reference or [toy_step()])
    keywords = {"mesh": MESH, "placements": sharded, **options}
    write_trace(tmp_path / "par", parallel, **keywords)
    report = compare(tmp_path / "ref", tmp_path / "par")
    check_schema(report)
    return report


def row(report: Report, kind: str, name: str) -> TensorRow:
    return next(row for row in report.tensors if (row.kind, row.name) == (kind, name))


def noisy(tensors: dict[Any, Tensor], size: float = 2e-16) -> dict[Any, Tensor]:
    """Return tensors with the rounding of another order of summation."""
    generator = torch.Generator().manual_seed(5)
    return {
        key: value
        if key[0] in (Kind.PARAM,)
        else value * (1 + size * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        for key, value in tensors.items()
    }
