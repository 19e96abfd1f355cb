from __future__ import annotations

import pytest
import torch

from paralign.errors import ConfigError
from paralign.requirements import require_torch


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0+cpu", "2.14.1", "3.0", "2.13.0a0+gitcf30153"]
)
def test_a_new_torch_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


def test_an_old_torch_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(ConfigError) as caught:
        require_torch()
    assert str(caught.value) == (
        "torch=2.9.1+cu128 is too old: parallelize needs torch >= 2.13. Install it with "
        "pip install -c constraints.txt 'torch>=2.13', or only record this run (paralign.record "
        "needs torch >= 2.4) and judge it elsewhere with paralign compare."
    )


def test_versions_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    require_torch("2.4", feature="record")
    with pytest.raises(ConfigError, match=r"record needs torch >= 2\.10"):
        require_torch("2.10", feature="record")


def test_a_version_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "main")
    with pytest.raises(ConfigError, match=r"torch version 'main' does not start with major\.minor"):
        require_torch()
