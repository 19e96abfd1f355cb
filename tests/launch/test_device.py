from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import pytest
import torch

from paralign.errors import ConfigError
from paralign.launch.device import (
    backend_for,
    bind_device,
    describe_available,
    device_name,
    has_float64,
    num_devices,
    peak_memory,
)


@pytest.mark.parametrize(
    ("device_type", "backend"),
    [("cpu", "gloo"), ("cuda", "nccl"), ("npu", "hccl"), ("xpu", "xccl")],
)
def test_each_device_type_has_its_backend(device_type, backend):
    assert backend_for(device_type) == backend


@pytest.mark.parametrize("device_type", ["cuda:0", "gpu", ""])
@pytest.mark.parametrize("function", [backend_for, num_devices, has_float64])
def test_unknown_device_types_are_refused(function, device_type):
    with pytest.raises(ConfigError) as caught:
        function(device_type)
    assert str(caught.value) == (
        f"device={device_type!r} is not a device type. Use one of cpu, cuda, npu, xpu."
    )


def test_the_cpu_serves_any_number_of_ranks():
    assert bind_device("cpu", local_rank=7, local_world_size=8) == torch.device("cpu")
    assert has_float64("cpu")


def test_too_few_devices_are_refused_and_the_message_says_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        bind_device("cuda", local_rank=0, local_world_size=4)
    assert str(caught.value) == (
        "device='cuda': 4 ranks on this machine need as many devices, and it has 2. "
        "Available: cpu, cuda (2). Use fewer ranks or another device."
    )


def test_an_absent_device_type_is_refused(monkeypatch):
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "is_available", lambda: False)
    assert describe_available() == "cpu"
    with pytest.raises(ConfigError, match=r"and it has 0\. Available: cpu\. "):
        bind_device("xpu", local_rank=0, local_world_size=1)


def test_the_local_rank_chooses_the_device(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert bind_device("cuda", local_rank=3, local_world_size=4) == torch.device("cuda", 3)
    assert chosen == [3]


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here")
def test_npu_needs_its_package():
    with pytest.raises(
        ConfigError, match=r"^device='npu' needs the package torch_npu, .*Available: cpu"
    ):
        num_devices("npu")


def test_float64_is_known_without_the_device():
    assert has_float64("cuda")
    assert not has_float64("npu")


STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say what a process takes")
def test_the_peak_on_the_cpu_is_at_least_what_is_taken_now():
    cpu = torch.device("cpu")
    assert device_name(cpu) == "cpu"
    resident = int(STATM.read_text().split()[1]) * resource.getpagesize()
    assert 0.9 * resident <= peak_memory(cpu) < 100 * resident


def test_an_accelerator_is_asked_for_its_name_and_its_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fast {device.index}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + device.index)
    device = torch.device("cuda", 3)
    assert device_name(device) == "Fast 3"
    assert peak_memory(device) == 1003
