from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paralign.errors import ConfigError
from paralign.launch import run_ranks
from paralign.launch.rank import MainModule, num_cores
from tests.launch import rank_functions as on_rank


@pytest.mark.ranks
def test_ranks_get_the_environment_and_folder_of_now(tmp_path, monkeypatch):
    run_ranks(on_rank.plain_rank, 1)  # the fork server runs from here on
    monkeypatch.setenv("PARALIGN_TEST_VARIABLE", "first")
    assert [f["variable"] for f in _facts(2)] == ["first", "first"]
    monkeypatch.setenv("PARALIGN_TEST_VARIABLE", "second")
    monkeypatch.chdir(tmp_path)
    facts = _facts(2)
    assert [f["variable"] for f in facts] == ["second", "second"]
    assert [f["cwd"] for f in facts] == [str(tmp_path)] * 2
    monkeypatch.delenv("PARALIGN_TEST_VARIABLE")
    assert [f["variable"] for f in _facts(1)] == [None]


@pytest.mark.ranks
def test_ranks_talk_over_loopback_and_do_not_think_that_torchrun_started_them(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    (facts,) = _facts(1)
    assert facts["backend"] == "gloo"
    assert facts["interface"] in ("lo", "lo0")
    assert facts["torchrun"] == []


@pytest.mark.ranks
def test_each_rank_is_a_process_of_its_own():
    pids = {facts["pid"] for facts in _facts(3)}
    assert len(pids) == 3
    assert os.getpid() not in pids


@pytest.mark.ranks
def test_a_wrong_device_is_a_config_error_of_all_ranks():
    with pytest.raises(ConfigError) as caught:
        run_ranks(on_rank.plain_rank, 2, device="gpu")
    assert str(caught.value) == (
        "[rank 0] device='gpu' is not a device type. Use one of cpu, cuda, npu, xpu.\n"
        "(the same on all 2 ranks)"
    )


def test_cores_are_those_this_process_may_use():
    assert num_cores() == len(os.sched_getaffinity(0))


def test_the_main_module_is_imported_under_another_name(tmp_path, monkeypatch):
    script = tmp_path / "command"
    script.write_text("def fn(): return __name__\nif __name__ == '__main__': raise SystemExit\n")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])  # put back at the end
    MainModule(name=None, path=str(script)).import_here()
    assert sys.modules["__main__"].fn() == "__mp_main__"


def test_the_main_module_of_a_test_run_is_found():
    main = MainModule.of_this_program()
    assert main is not None
    assert main.path is not None
    assert Path(main.path).is_absolute()


def _facts(world_size: int) -> list[dict[str, object]]:
    return run_ranks(on_rank.rank_facts, world_size, "PARALIGN_TEST_VARIABLE")
