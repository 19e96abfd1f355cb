"""Memory and time of comparing two large traces, against reading both files once.

    python -m bench.compare_large [--parameters 1000000000] [--rounds 3] [--dir DIR] [--check]

Both traces hold the gradients of a model in fp32, on one rank and on two (rows sharded), and differ
in their last bits. Each side runs in a process of its own: one reads every payload from its first
byte to its last, the other compares. Files are dropped from the page cache before each (``cold``),
or left there (``warm``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench._rounds import Times, median_ratio, median_seconds, turns

MOST_TIMES = 2.0
MOST_BYTES = 1_000_000_000
WIDTH = 4096
_BUFFER = 1 << 23


def write_traces(directory: Path, parameters: int, width: int = WIDTH) -> int:
    """Write ``ref`` and ``par`` below ``directory``; return how many elements each has."""
    import torch

    from paralign.align.trace import Facts, RankIndex, ScalarEntry, TensorEntry
    from paralign.align.trace_writer import TraceWriter, prepare_folder
    from paralign.layout import Span

    count = -(-parameters // (width * width))
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(width, width, generator=generator)
    noise = 1 + 1e-7 * torch.randn(width, width, generator=generator)
    for name, degree in (("ref", 1), ("par", 2)):
        folder = directory / name
        prepare_folder(folder, rank=0, clear_all=True)
        rows = width // degree
        for rank in range(degree):
            index = RankIndex(rank, degree, name, steps=[0])
            index.axes["fsdp"] = list(range(degree))
            index.coordinates["fsdp"] = rank
            writer = TraceWriter(folder, index)
            first = rank * rows
            held = (Span((0, rows), (first, first + rows)),), (Span((0, width), (0, width)),)
            for number in range(count):
                whole = source.roll(number, 0)[first : first + rows]
                local = whole * noise[first : first + rows] if degree > 1 else whole
                entry = TensorEntry(
                    "grad", f"layers.{number}.w", 0, "float32", (width, width), held
                )
                writer.write(f"step0.grad.{number}", [(entry, local)])
            writer.scalar(ScalarEntry("loss", 0, 2.0, 10))
            run = {"compute_dtype": "float32"}
            facts = Facts(name, degree, [0], ["loss", "grads"], {}, run)
            writer.finish(facts if rank == 0 else None)
    return count * width * width


def read_once(directory: Path) -> float:
    """Read every payload of both traces; return the seconds it took."""
    begin = time.perf_counter()
    buffer = memoryview(bytearray(_BUFFER))
    for path in payloads(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def compare_once(directory: Path) -> float:
    """Compare both traces; return the seconds it took.

    Raises:
        RuntimeError: They are not found to be aligned.
    """
    from paralign.align.compare import compare

    begin = time.perf_counter()
    report = compare(directory / "ref", directory / "par")
    seconds = time.perf_counter() - begin
    if report.verdict != "aligned" or not report.worst or not report.worst.rel_l2 > 0:
        raise RuntimeError(f"the traces are {report.verdict}: {report.why}")
    return seconds


def payloads(directory: Path) -> list[Path]:
    """Return the payload files of both traces."""
    return sorted(directory.glob("*/*.safetensors"))


def drop_from_cache(directory: Path) -> None:
    """Ask the system to forget what it keeps of the files."""
    for path in payloads(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_bytes() -> int:
    """Return the most memory this process has had, of its own and of mapped files.

    ``getrusage`` would count what its parent had when it made this process.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_alone(side: str, directory: Path) -> tuple[float, int]:
    """Run one side in a process of its own; return its seconds and peak memory in bytes."""
    command = [sys.executable, "-m", "bench.compare_large", "--side", side, "--dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    return said["seconds"], said["peak_bytes"]


def measure(directory: Path, rounds: int, *, cold: bool) -> tuple[list[Times], int]:
    """Time both sides in turn; return the rounds and the comparison's largest peak memory."""
    times: list[Times] = []
    peak = 0
    for number in range(rounds):
        found: Times = {}
        for side in turns(("read", "compare"), number):
            if cold:
                drop_from_cache(directory)
            found[side], held = run_alone(side, directory)
            peak = max(peak, held if side == "compare" else 0)
        times.append(found)
    return times, peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--side", choices=("read", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args(arguments)
    if options.side:
        run = read_once if options.side == "read" else compare_once
        seconds = run(options.dir)
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}))
        return 0
    directory = Path(tempfile.mkdtemp(prefix="paralign-large-", dir=options.dir))
    try:
        need, free = 8 * options.parameters * 1.05, shutil.disk_usage(directory).free
        if free < need:
            print(f"{directory} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} are needed")
            return 2
        elements = write_traces(directory, options.parameters)
        passed = True
        print(f"{elements:,} parameters in fp32 on each side, medians of {options.rounds} rounds")
        print("files    read once     compare     ratio     peak memory")
        for name in ("cold", "warm"):
            times, peak = measure(directory, options.rounds, cold=name == "cold")
            ratio = median_ratio(times, "compare", "read")
            read, compared = (median_seconds(times, side) for side in ("read", "compare"))
            spread = statistics.pstdev(t["compare"] / t["read"] for t in times)
            print(
                f"{name}   {read:9.2f} s {compared:9.2f} s   {ratio:5.2f} (+-{spread:.2f})   "
                f"{peak / 1e6:6.0f} MB",
                flush=True,
            )
            passed &= peak < MOST_BYTES and (ratio <= MOST_TIMES or name == "warm")
    finally:
        shutil.rmtree(directory)
    return 1 if options.check and not passed else 0


if __name__ == "__main__":
    raise SystemExit(main())
