"""Two torchrun agents on one machine, as on two nodes: a rank or an agent dies, the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from paralign.config.run import RunConfig
from paralign.train.checkpoint import find_checkpoints
from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config, worst

STEPS = 40


SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "torchrun.sh"


def agent(path: Path, port: int, log: Path, *, nodes: str) -> subprocess.Popen[bytes]:
    """Start an agent with two ranks as the example does, in a process group of its own."""
    where = {"HEAD": "127.0.0.1", "PORT": str(port), "NODES": nodes, "GPUS": "2"}
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(SCRIPT), str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **where, "PATH": binaries, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def wait_for(what: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


@contextmanager
def two_agents(path: Path, log: Path, *, nodes: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two agents, the first of which holds the rendezvous; leave none behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [agent(path, port, log, nodes=nodes)]
    try:
        time.sleep(1)
        agents.append(agent(path, port, log, nodes=nodes))
        yield agents
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def written(folder: Path, **settings: Any) -> tuple[RunConfig, Path]:
    """Return a config that saves every step, and a file that says it but for dp_shard."""
    settings = {"save_every": 1, "log_every": 1, **settings}
    config = training_config(folder, mesh={"pp": 2, "dp_shard": 2}, train=settings)
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["mesh"]["dp_shard"] = "auto"
    path = folder / "run.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(raw))
    return config, path


def twice(folder: Path, steps: int) -> tuple[RunConfig, RunConfig, Path, Path]:
    """Make a calm run; return it, another one to be made, its file, and where agents' words go."""
    calm, _ = written(folder / "calm", steps=steps)
    run(calm)
    return calm, *written(folder / "run", steps=steps), folder / "log"


def num_steps(config: RunConfig) -> int:
    return len(read_metrics(Path(config.train.dir)))


@pytest.mark.long
@pytest.mark.ranks
def test_a_rank_dies_and_all_go_on_from_the_checkpoint(tmp_path):
    calm, config, path, log = twice(tmp_path, STEPS)
    with two_agents(path, log, nodes="2") as agents:
        wait_for(lambda: num_steps(config) >= 5, 120, log)
        assert 1 <= find_checkpoints(Path(config.train.dir) / "checkpoints")[-1].step < STEPS - 5
        [rank, *_] = children(agents[1].pid)
        os.kill(rank, signal.SIGKILL)
        for each in agents:
            assert each.wait(timeout=240) == 0, log.read_text()[-4000:]
    assert "going on from" in log.read_text()
    ours, theirs = tensors_in(newest(config)), tensors_in(newest(calm))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[line["loss"] for line in read_metrics(Path(c.train.dir))] for c in (config, calm)]
    assert losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.ranks
def test_an_agent_dies_and_the_other_goes_on_with_fewer_ranks(tmp_path):
    """With ``--nodes=1:2`` and ``dp_shard: auto`` the ranks that are left are a mesh as well."""
    calm, config, path, log = twice(tmp_path, STEPS)
    with two_agents(path, log, nodes="1:2") as agents:
        wait_for(lambda: num_steps(config) >= 5, 120, log)
        for process in [*children(agents[1].pid), agents[1].pid]:  # as when a machine is lost
            os.kill(process, signal.SIGKILL)
        agents[1].wait()
        assert agents[0].wait(timeout=200) == 0, log.read_text()[-4000:]
    assert log.read_text().count("going on from") == 1
    assert num_steps(config) == STEPS
    assert worst(tensors_in(newest(config)), tensors_in(newest(calm))) < 1e-10


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
