from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import paralign as pa
from paralign.align import trace as trace_module
from paralign.align.inspect import fingerprint
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import TraceError
from tests.align.inspect.runs import look, on, plain_step
from tests.align.synthetic import toy_step, write_trace

SCHEMAS = Path(trace_module.__file__).parent / "schema"


def schema(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return content


def valid(report: pa.InspectReport) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(report.to_json())
    jsonschema.Draft202012Validator(schema("inspect")).validate(content)
    return content


def test_a_clean_run_on_one_device_too(tmp_path):
    write_trace(tmp_path, [toy_step(0)])
    report = pa.inspect(tmp_path)
    content = valid(report)
    assert (content["verdict"], report.exit_status, content["findings"]) == ("clean", 0, [])
    assert "could not judge ranks, inputs, labels, experts, replicas, norm" in report.why


def test_findings_come_in_causal_order_and_as_json(tmp_path):
    def change(rank, entry, local):
        if entry.kind == Kind.GRAD and entry.name == "norm.weight" and rank >= 2:
            return -local
        if entry.kind == Kind.PARAM_AFTER and entry.name == "layers.0.w" and rank == 3:
            return local + 1
        return local

    report = look(tmp_path, [plain_step()], change=change, norm=0.5)
    assert [(f.component, f.cause) for f in report.findings] == [
        ("reduction", "missing_reduction"),
        ("optimizer", "single_rank"),
        ("clipping", "wrong_norm"),
    ]
    content = valid(report)
    assert content["why"].startswith("3 findings, first reduction: missing_reduction")
    assert {check["name"]: check["findings"] for check in content["checks"]}["replicas"] == 2


def test_the_same_findings_as_in_a_report():
    assert schema("inspect")["$defs"]["finding"] == schema("report")["$defs"]["finding"]


def test_nan_can_be_written_down(tmp_path):
    report = look(tmp_path, [plain_step()], norm=float("nan"))
    assert valid(report)["findings"][0]["evidence"]["reported"]["0"] == "nan"


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(TraceError, match="is not a trace"):
        pa.inspect(tmp_path)


def test_what_was_not_recorded_is_noted(tmp_path):
    look(tmp_path, [plain_step()])
    path = tmp_path / "rank00001.json"
    data = json.loads(path.read_text())
    data["not_recorded"] = [{"name": "w.exp_avg", "why": "it is factored"}]
    path.write_text(json.dumps(data))
    assert "rank 1 did not record w.exp_avg: it is factored" in pa.inspect(tmp_path).notes


def test_a_piece_is_read_in_parts(tmp_path, monkeypatch):
    """No more than one part of a piece is in memory, whatever its size."""
    monkeypatch.setattr(fingerprint, "PART_ELEMENTS", 5)
    sizes = []
    original = TraceReader.read

    def read(self, entry, box):
        sizes.append(box.numel)
        return original(self, entry, box)

    monkeypatch.setattr(TraceReader, "read", read)
    change = on({2, 3}, Kind.GRAD, "layers.0.w", lambda g: -g)
    report = look(tmp_path, [plain_step()], change=change)
    assert [f.cause for f in report.findings] == ["missing_reduction"]
    assert max(sizes) <= 5


def test_parts_do_not_change_what_is_found(tmp_path, monkeypatch):
    write_trace(tmp_path, [plain_step()])
    with TraceReader(tmp_path) as reader:
        entry = next(e for e in reader.ranks[0].tensors if e.name == "layers.0.w")
        whole = fingerprint.take_fingerprint(reader, entry)
        monkeypatch.setattr(fingerprint, "PART_ELEMENTS", 6)
        parts = fingerprint.take_fingerprint(reader, entry)
    assert parts.digest == whole.digest
    assert parts.norm == pytest.approx(whole.norm, rel=1e-15)
    expected = plain_step()[Kind.PARAM, "layers.0.w"]
    assert whole.norm == pytest.approx(float(expected.norm()), rel=1e-15)
    assert whole.largest == float(expected.abs().max())
    assert (whole.elements, whole.zeros, whole.is_constant) == (24, 0, False)


def test_flat_pieces_are_read_as_they_are(tmp_path):
    from dataclasses import replace

    from paralign.align.tensor_entry import TensorEntry
    from paralign.layout import whole

    entry = TensorEntry("grad", "w", 0, "float32", (4, 4), whole((4, 4)), flat=(3, 9))
    assert [box.shape for box in fingerprint.parts_of(entry)] == [(6,)]
    assert list(fingerprint.parts_of(replace(entry, flat=(3, 3)))) == []
    assert torch.Size(entry.held_shape) == (6,)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("pp=2", "dp_shard=1", "cp=2"), marks=pytest.mark.long),
        ("pp=1", "dp_shard=2", "cp=2"),
    ],
)
def test_a_real_run_on_ranks_is_clean(tmp_path, mesh):
    """Inputs, labels, losses, gradients, replicas and norms of paralign's own parallel run."""
    from paralign.config.load import load_config
    from paralign.launch import run_ranks
    from paralign.prove.parallel import run_parallel
    from paralign.train.build import numerics

    example = Path(__file__).parents[3] / "examples" / "pp_fsdp_cp.yaml"
    config = load_config(example, [f"mesh.{degree}" for degree in mesh])
    run_ranks(run_parallel, 4, config, numerics("float64", config), tmp_path / "par")
    report = pa.inspect(tmp_path / "par")
    assert [finding.fix for finding in report.findings] == []
    looked = {check.name: check.looked_at for check in report.checks}
    blind = {name for name, count in looked.items() if count == 0}
    assert blind <= {"clipping", "experts"}  # no experts here, and clipping may change nothing


@pytest.mark.ranks
def test_mistakes_on_ranks_are_found_in_what_they_recorded(tmp_path):
    from paralign.testing import run_on_ranks
    from tests.align.inspect.on_ranks import record_runs

    run_on_ranks(record_runs, 2, tmp_path)
    found = {
        folder.name: [(f.component, f.cause, f.axes, f.tensor) for f in pa.inspect(folder).findings]
        for folder in tmp_path.iterdir()
    }
    assert found.pop("own_seed")[0][:3] == ("weights", "rng", ["dp"])
    assert found == {
        "none": [],
        "unreduced": [("reduction", "missing_reduction", ["dp"], "norm.weight")],
        "same_rows": [("data", "different_data", ["dp"], "tokens")],
        "summed_norm": [("clipping", "wrong_norm", ["dp"], None)],
        "lost_parameter": [("optimizer", "missing_contribution", [], "head.bias")],
    }
