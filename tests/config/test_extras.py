from __future__ import annotations

import pytest

from paralign.config import extras
from paralign.config.extras import missing_packages
from tests.parity import make_config


def test_what_is_asked_for_and_missing_is_named_with_its_extra(monkeypatch):
    config = make_config(metrics={"tensorboard": True, "wandb": "demo"})
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert missing_packages(config) == [
        "metrics.tensorboard=true needs the package tensorboard, which is not installed. Install "
        "it with pip install 'paralign[tensorboard]', or remove metrics.tensorboard.",
        "metrics.wandb='demo' needs the package wandb, which is not installed. Install it with "
        "pip install 'paralign[wandb]', or remove metrics.wandb.",
    ]
    assert missing_packages(make_config()) == []


def test_nothing_is_said_of_what_is_there(monkeypatch):
    pytest.importorskip("tensorboard")
    config = make_config(metrics={"tensorboard": True})
    assert missing_packages(config) == []
