from __future__ import annotations

import pytest

from paralign.train.peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200 NVL", "bfloat16", 835.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_known_devices_have_the_peaks_of_their_data_sheets(name, dtype, tera):
    assert peak_flops(name, dtype) == tera * 1e12


def test_what_is_not_known_is_not_made_up():
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("NVIDIA H100 PCIe", "float64") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "bfloat16") is None


def test_what_is_stated_counts_more_than_the_table():
    assert peak_flops("cpu", "float32", 0.25) == 0.25e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16", 100.0) == 100e12
