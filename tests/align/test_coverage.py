from __future__ import annotations

from pathlib import Path
from typing import Any

from paralign.align import compare
from tests.align.foreign import both, decoder, gradients_of
from tests.align.synthetic import toy_step, write_trace


def paths(tmp_path: Path, facts: dict[str, Any], reference: dict[str, Any] | None = None) -> Any:
    write_trace(tmp_path / "ref", [toy_step()], facts=reference or facts)
    write_trace(tmp_path / "par", [toy_step()], facts=facts)
    return compare(tmp_path / "ref", tmp_path / "par").coverage.paths


def test_float64_takes_other_kernels_than_the_run_will(tmp_path: Path) -> None:
    (told,) = paths(tmp_path, {})
    assert "kernels of float32, bfloat16, float16" in told
    (told,) = paths(tmp_path, {"train_dtype": "bfloat16"})
    assert told.startswith("bfloat16 kernels (attention, grouped matmul, fused ones): compared in")
    assert paths(tmp_path, {"train_dtype": "float64"}) == []


def test_kernels_that_only_the_reference_used_are_named(tmp_path: Path) -> None:
    said = {"train_dtype": "float64", "paths": ["flash_attention", "compile"]}
    assert paths(tmp_path, said) == []
    without = {"train_dtype": "float64", "paths": ["compile"]}
    (told,) = paths(tmp_path, without, said)
    assert told.startswith("flash_attention: used by the run")


def test_every_tensor_counts_once_and_under_how_it_was_paired(tmp_path: Path) -> None:
    weights = decoder(1)
    foreign = {name.replace("head.", "out."): weight for name, weight in weights.items()}
    gradients = {n.replace("head.", "out."): g for n, g in gradients_of(weights).items()}
    report = both(tmp_path, [(foreign, gradients)], weights)
    assert report.verdict == "aligned", report.why
    assert report.coverage.paired == {
        "placement": len(weights) - 1,
        "content": 1,
        "position": 0,
        "rule": 0,
    }
    assert sum(report.coverage.paired.values()) == report.coverage.compared
    del gradients["out.weight"]
    report = both(tmp_path, [(foreign, gradients)], weights)
    assert report.coverage.paired["content"] == 0
    assert report.verdict == "inconclusive"
