"""The recording half in an image with the oldest torch: recorded there, compared here."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

import paralign as pa

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "foreign" / "ddp_accumulation.py"
OLDEST = ["torch==2.4.1", "numpy<2", "safetensors"]  # numpy 2 is newer than this torch


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``bin`` of an environment with the oldest torch, and paralign without the rest."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
    got = subprocess.run([*pip, *OLDEST], capture_output=True, text=True, check=False)
    if got.returncode != 0:
        pytest.skip(f"torch 2.4.1 cannot be installed here: {got.stderr[-300:]}")
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
    return folder / "bin"


def record(image: Path, trace: Path, *arguments: str) -> Path:
    """Run the script in the image: alone, or on two ranks."""
    if "--reference" in arguments:
        command = [str(image / "python"), str(SCRIPT)]
    else:
        command = [str(image / "torchrun"), "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--trace", str(trace), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return trace


@pytest.mark.long
def test_a_run_in_an_old_image_is_compared_here(image, tmp_path):
    check = "import torch, sys; assert torch.__version__.startswith('2.4.'), torch.__version__; "
    check += "import paralign as pa; pa.record; "
    check += "assert not {'pydantic', 'typer', 'rich'} & set(sys.modules)"
    subprocess.run([str(image / "python"), "-c", check], check=True)
    reference = record(image, tmp_path / "reference", "--reference")
    assert pa.compare(reference, record(image, tmp_path / "parallel")).verdict == "aligned"

    report = pa.compare(reference, record(image, tmp_path / "broken", "--fault"))
    assert report.verdict == "misaligned"
    first = report.findings[0]
    assert (first.component, list(first.axes), first.cause) == (
        "reduction",
        ["dp"],
        "missing_reduction",
    )
