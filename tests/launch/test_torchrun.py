from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paralign.errors import ConfigError
from paralign.launch import World, current_world, join_world

ROOT = Path(__file__).parents[2]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Two worlds one after the other; in the third, rank 1 raises. The output goes to one file per rank,
# because torchrun's own streams are those of both.
PROGRAM = """
import sys
from pathlib import Path
from paralign.launch import current_world, join_world
from paralign.mesh import Degrees

def main(folder):
    lines = [str(tuple(current_world()))]
    for _ in range(2):
        with join_world("cpu", timeout=60) as world:
            import torch
            import torch.distributed as dist
            total = torch.ones(1) * (world.rank + 1)
            dist.all_reduce(total)
            lines.append(f"{total.item()} {dist.get_backend()} {dist.is_initialized()}")
        lines.append(str(dist.is_initialized()))
    try:
        with join_world("cpu", describe=Degrees(cp=2).describe_rank) as world:
            if world.rank == 1:
                raise ValueError("on fire")
    except Exception as error:
        lines.append(f"{type(error).__name__} {error}")
    lines.append(str(dist.is_initialized()))
    (Path(folder) / str(world.rank)).write_text("\\n".join(lines))

main(sys.argv[1])
"""


@pytest.mark.ranks
def test_ranks_of_torchrun_join_their_world(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    results = tmp_path / "results"
    results.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run(
        [*torchrun, str(program), str(results)],
        check=True,
        capture_output=True,
        timeout=180,
        env=_without_world() | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    for rank in range(2):
        place, *worlds, last = (results / str(rank)).read_text().splitlines()
        assert place == str((rank, 2))
        assert worlds[:4] == ["3.0 gloo True", "False"] * 2
        error = ["RankError [rank 1: cp=1] ValueError: on fire"] if rank == 1 else []
        assert worlds[4:] == error
        assert last == "False"


def test_outside_torchrun_there_is_no_world(monkeypatch):
    _clear(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "4")  # cluster images set it alone
    assert current_world() is None
    with pytest.raises(ConfigError, match=r"there is no world to join: .*Start this program with"):
        with join_world("cpu"):
            pass


def test_the_environment_of_torchrun_is_read(monkeypatch):
    _clear(monkeypatch)
    for name, value in zip(NAMES, ("5", "1", "8", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert current_world() == World(rank=5, world_size=8)


def test_an_incomplete_environment_is_refused(monkeypatch):
    _clear(monkeypatch)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError) as caught:
        current_world()
    assert str(caught.value) == (
        "the environment is not that of a torchrun rank. Start with torchrun, which sets them all, "
        "or unset RANK and LOCAL_RANK. What is wrong:\n"
        "  - LOCAL_RANK is not set\n"
        "  - MASTER_ADDR is not set\n"
        "  - MASTER_PORT is not set\n"
        "  - WORLD_SIZE='two' must be a whole number"
    )


def test_a_rank_outside_its_world_is_refused(monkeypatch):
    _clear(monkeypatch)
    for name, value in zip(NAMES, ("8", "0", "8", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK=8 must be less than WORLD_SIZE=8"):
        current_world()


def _without_world() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NAMES}


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
