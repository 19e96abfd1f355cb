"""The public names: exactly these, each importable, and the same for people and type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import paralign as pa

PUBLIC = {
    "AlignError",
    "Batch",
    "Blueprint",
    "Compile",
    "ConfigError",
    "Context",
    "ContextParallel",
    "Degrees",
    "Dropout",
    "FSDP",
    "Fused",
    "Init",
    "InspectReport",
    "ParalignError",
    "Pipeline",
    "Precision",
    "Program",
    "RankError",
    "Recompute",
    "Report",
    "RunConfig",
    "TensorParallel",
    "__version__",
    "align",
    "build_mesh",
    "compare",
    "fault",
    "inspect",
    "load_config",
    "load_initial",
    "on_local_shards",
    "parallelize",
    "record",
}


def test_the_public_names_are_these():
    assert set(pa.__all__) == PUBLIC
    assert set(dir(pa)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__", "Batch"}))
def test_a_public_name_is_documented_and_calls_what_it_names(name):
    value = getattr(pa, name)
    assert callable(value)
    assert value.__doc__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(pa.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == pa._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'paralign' has no attribute 'paralelize'"):
        _ = pa.paralelize


@pytest.mark.parametrize(
    ("module", "name"), [("paralign.align", "align"), ("paralign.parallelize", "parallelize")]
)
def test_a_room_with_the_name_of_a_function_can_be_called(module, name):
    # Importing the room binds it in place of the function; in a fresh process, so that it is first.
    code = (
        f"import {module}, paralign as pa, types; assert isinstance(pa.{name}, types.ModuleType)\n"
        f"try: pa.{name}(no_such_argument=1)\n"
        "except TypeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{name}() got an unexpected keyword argument 'no_such_argument'" in run.stdout


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert version("paralign") == pa.__version__


def test_the_package_says_that_it_is_typed():
    assert (Path(pa.__file__).parent / "py.typed").is_file()
    assert isinstance(pa, types.ModuleType)
