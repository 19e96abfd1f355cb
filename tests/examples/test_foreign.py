"""Six scripts that do not use paralign's parallel code: aligned, and each with a fault found."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.examples.replay import compare, inspect, record_parallel, record_reference

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "foreign"
MARK = "# paralign"


class Expected(NamedTuple):
    """A script's world, and what its fault is found to be."""

    world_size: int
    component: str
    axes: list[str]
    cause: str
    tensor: str
    inspected: bool
    """Whether the parallel trace alone betrays it."""


SCRIPTS = {
    "fsdp_tp": Expected(4, "reduction", ["tp"], "missing_reduction", ".attention.w", True),
    "ddp_accumulation": Expected(2, "reduction", ["dp"], "missing_reduction", "", True),
    "ulysses": Expected(2, "data", ["cp"], "label_shift", "", True),
    "pipeline": Expected(2, "backward", [], "constant_factor", "", False),
    "trainer": Expected(2, "clipping", ["dp"], "wrong_norm", "", True),
    "megatron": Expected(2, "reduction", ["tp"], "missing_reduction", "norm.weight", True),
}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"examples.foreign.{name}")


def test_every_script_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_recording_is_at_most_five_marked_lines(name):
    source = (FOLDER / f"{name}.py").read_text()
    lines = source.splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith(MARK)}
    assert 1 <= len(marked) <= 5
    tree = ast.parse(source)
    used = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in ("pa", "rec")
    }
    imports = {
        node.lineno: [alias.name for alias in node.names]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "paralign" in ast.unparse(node)
    }
    assert used | set(imports) <= marked, "a line that records is not marked as added"
    assert list(imports.values()) == [["paralign"]], "only recording comes from paralign"
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pa"
    }
    assert attributes == {"record"}


@pytest.mark.ranks
@pytest.mark.parametrize("name", SCRIPTS)
def test_is_aligned_and_its_fault_is_explained(name, tmp_path):
    script, expected = load(name), SCRIPTS[name]
    reference = record_reference(script, tmp_path)

    clean = record_parallel(script, expected.world_size, tmp_path, "clean")
    verdict = compare(reference, clean)
    assert verdict.status == 0, verdict.told
    assert verdict.findings == []
    assert verdict.report["coverage"]["skipped"] == []
    verdict = inspect(clean)
    assert verdict.status == 0, verdict.told

    faulty = record_parallel(script, expected.world_size, tmp_path, "faulty", fault=True)
    verdict = compare(reference, faulty)
    assert verdict.status == 1, verdict.told
    found = verdict.findings[0]
    assert [found[key] for key in ("component", "axes", "cause")] == [
        expected.component,
        expected.axes,
        expected.cause,
    ], verdict.told
    assert expected.tensor in (found["tensor"] or ""), verdict.told
    assert found["fix"]

    verdict = inspect(faulty)
    assert (verdict.status == 1) is expected.inspected, verdict.told
    if expected.inspected:
        found = verdict.findings[0]
        assert found["component"] == expected.component, verdict.told
        assert found["axes"] == expected.axes, verdict.told
        assert found["cause"] == expected.cause, verdict.told


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_as_its_docstring_says(name, tmp_path):
    script = str(FOLDER / f"{name}.py")
    ranks = f"--nproc-per-node={SCRIPTS[name].world_size}"
    assert ranks in (load(name).__doc__ or "")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
    commands = [
        [sys.executable, script, "--reference", "--trace", "reference"],
        [*torchrun, script, "--trace", "parallel"],
        [sys.executable, "-m", "paralign", "compare", "reference", "parallel"],
        [*torchrun, script, "--trace", "parallel", "--fault"],
        [sys.executable, "-m", "paralign", "compare", "reference", "parallel"],
    ]
    statuses = [
        subprocess.run(command, cwd=tmp_path, timeout=300, capture_output=True).returncode
        for command in commands
    ]
    assert statuses == [0, 0, 0, 0, 1]
