from __future__ import annotations

import sys

import pytest

from paralign.config.references import UNKNOWN, read_signature
from paralign.errors import ConfigError

SOURCE = """
raise RuntimeError("this file is never run")
import torch as imported
SIZES = (a, b) = 1, 2
def build(num_layers, width=8, *, act=torch.relu, bias): ...
def loose(**kwargs): ...
class Model:
    def __init__(self, depth, width=4): ...
class Bare(Model): ...
if SIZES:
    def inside(): ...
else:
    def otherwise(): ...
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_pkg" / "deep").mkdir(parents=True)
    (tmp_path / "my_pkg" / "__init__.py").write_text("raise RuntimeError('never run')")
    (tmp_path / "my_pkg" / "model.py").write_text(SOURCE)
    (tmp_path / "my_pkg" / "broken.py").write_text("def build(:\n")
    (tmp_path / "my_pkg" / "star.py").write_text("from my_pkg.model import *\n")
    (tmp_path / "my_pkg" / "deep" / "inner.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_read_without_running_its_file(here):
    found = read_signature("model.build", "my_pkg.model:build")
    assert found.required == ("num_layers", "bias")
    assert found.defaults == {"width": 8, "act": None}
    assert not found.takes_any
    assert "my_pkg" not in sys.modules


def test_a_class_is_called_without_self(here):
    found = read_signature("model.build", "my_pkg.model:Model")
    assert found.names == ["depth", "width"]


@pytest.mark.parametrize("name", ["Bare", "imported", "a", "SIZES"])
def test_what_the_source_does_not_tell_takes_anything(here, name):
    assert read_signature("model.build", f"my_pkg.model:{name}") is UNKNOWN


@pytest.mark.parametrize(
    "reference",
    [
        "my_pkg.model:loose",
        "my_pkg.model:inside",
        "my_pkg.model:otherwise",
        "my_pkg.star:anything",
        "my_pkg.deep.inner:build",
        "my_pkg.deep:build",
        "math:sqrt",
        "json:dumps",
    ],
)
def test_found(here, reference):
    read_signature("model.build", reference)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("my_pkg.model", "joined by a colon"),
        ("my_pkg.model:", "joined by a colon"),
        (":build", "joined by a colon"),
        ("my-pkg.model:build", "joined by a colon"),
        ("nowhere.model:build", "there is no module nowhere"),
        ("my_pkg.nowhere:build", "there is no module my_pkg.nowhere"),
        ("my_pkg.model.deeper:build", "there is no module my_pkg.model.deeper"),
        ("my_pkg.model:bild", "defines no bild. Did you mean build?"),
        ("my_pkg.broken:build", "cannot be read as Python"),
    ],
)
def test_not_found(here, reference, reason):
    with pytest.raises(ConfigError) as caught:
        read_signature("model.build", reference)
    assert f"model.build={reference!r}" in str(caught.value)
    assert reason in str(caught.value)
