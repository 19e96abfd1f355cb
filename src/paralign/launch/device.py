"""Devices by type: the one module that knows what differs between accelerators."""

from __future__ import annotations

import importlib
import resource
import sys
from types import ModuleType

import torch

from paralign.errors import ConfigError

# Process-group backend of each device type.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


def backend_for(device_type: str) -> str:
    """Return the process-group backend of ``device_type``.

    Raises:
        ConfigError: paralign does not know the type.
    """
    if device_type not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigError(f"device={device_type!r} is not a device type. Use one of {known}.")
    return BACKENDS[device_type]


def num_devices(device_type: str) -> int:
    """Return how many devices of the type this process sees; for cpu always 1.

    Raises:
        ConfigError: paralign does not know the type, or ``npu`` without ``torch_npu``.
    """
    backend_for(device_type)
    if device_type == "cpu":
        return 1
    module = _device_module(device_type)
    return int(module.device_count()) if module.is_available() else 0


def bind_device(device_type: str, *, local_rank: int, local_world_size: int) -> torch.device:
    """Make device ``local_rank`` of this machine the current one, and return it.

    Raises:
        ConfigError: The machine has fewer devices than ranks; the message names those it has.
    """
    found = num_devices(device_type)
    if device_type == "cpu":
        return torch.device("cpu")
    if found < local_world_size:
        raise ConfigError(
            f"device={device_type!r}: {local_world_size} ranks on this machine need as many "
            f"devices, and it has {found}. Available: {describe_available()}. Use fewer ranks or "
            "another device."
        )
    _device_module(device_type).set_device(local_rank)
    return torch.device(device_type, local_rank)


def has_float64(device_type: str) -> bool:
    """Tell whether the device type computes in float64, so that it can be its own yardstick."""
    backend_for(device_type)
    if device_type == "xpu":
        # Some integrated and data-centre parts lack it.
        return num_devices("xpu") > 0 and bool(torch.xpu.get_device_properties(0).has_fp64)
    return device_type in ("cpu", "cuda")


def device_name(device: torch.device) -> str:
    """Return what the maker calls the device, such as ``"NVIDIA H200"``; for the CPU ``"cpu"``."""
    if device.type == "cpu":
        return "cpu"
    return str(_device_module(device.type).get_device_name(device))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors of this process have taken on the device so far.

    On the CPU, the largest resident size of the process, with all of its code and data.
    """
    if device.type == "cpu":
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024  # elsewhere in KiB
    return int(_device_module(device.type).max_memory_allocated(device))


def describe_available() -> str:
    """Return ``"cpu, cuda (8)"``: what ranks can use on this machine, ``torch_npu`` left alone."""
    counts = {name: num_devices(name) for name in ("cuda", "xpu")}
    return ", ".join(["cpu", *(f"{name} ({count})" for name, count in counts.items() if count)])


def _device_module(device_type: str) -> ModuleType:
    if device_type == "npu":
        _import_torch_npu()
    module = getattr(torch, device_type, None)
    if not isinstance(module, ModuleType):
        raise ConfigError(f"device={device_type!r}: this torch has no torch.{device_type}.")
    return module


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")  # registers the device type with torch
    except ImportError as error:
        raise ConfigError(
            "device='npu' needs the package torch_npu, which cannot be imported here: "
            f"{error}. Available: {describe_available()}."
        ) from error
