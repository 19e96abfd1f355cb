"""Two torchrun agents on one machine, as on two nodes: one dies, another comes, the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from paralign.train.checkpoint import find_checkpoints
from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config

STEPS = 40


SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "torchrun.sh"


def agent(path: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start an agent with two ranks as the example does, in a process group of its own."""
    where = {"HEAD": "127.0.0.1", "PORT": str(port), "NODES": "2", "GPUS": "2"}
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


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_one_of_two_agents_dies_and_the_run_goes_on_from_its_checkpoint(tmp_path, victim):
    settings = {"steps": STEPS, "save_every": 1, "log_every": 1}
    mesh = {"pp": 2, "dp_shard": 2}
    calm = training_config(tmp_path / "calm", mesh=mesh, train=settings)
    run(calm)
    config = training_config(tmp_path / "run", mesh=mesh, train=settings)
    path, log = tmp_path / "run.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(config.train.dir) / "checkpoints"
    agents = [agent(path, port, log)]  # the first holds the rendezvous
    try:
        time.sleep(1)
        agents.append(agent(path, port, log))
        wait_for(lambda: len(read_metrics(Path(config.train.dir))) >= 5, 120, log)
        reached = find_checkpoints(folder)[-1].step
        assert 1 <= reached < STEPS - 5
        if victim == "agent":
            os.killpg(agents[1].pid, signal.SIGKILL)
            agents[1].wait()
            agents[1] = agent(path, port, log)
        else:
            [rank, *_] = children(agents[1].pid)
            os.kill(rank, signal.SIGKILL)
        for each in agents:
            assert each.wait(timeout=240) == 0, log.read_text()[-4000:]
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    assert "going on from" in log.read_text()
    ours, theirs = tensors_in(newest(config)), tensors_in(newest(calm))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[line["loss"] for line in read_metrics(Path(c.train.dir))] for c in (config, calm)]
    assert losses[0] == losses[1]


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
