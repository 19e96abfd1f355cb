"""House style that no linter checks: sizes, plain text, and where a test lives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "examples", "bench", "docs", ".ci")
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".txt", ".json", ""}
MOST_LINES = 600

# Tests of the whole repository, and the second subject of a module whose tests are many.
WITHOUT_MODULE = {
    "tests/align/test_oldest_torch.py",
    "tests/test_imports.py",
    "tests/test_program_refusals.py",
    "tests/test_public_names.py",
    "tests/test_readme.py",
    "tests/test_style.py",
}
# Folders whose tests watch something else than a module of paralign.
WITHOUT_MIRROR = {"engine", "equivalence", "examples", "bench"}


def text_files() -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    found += [p for p in ROOT.iterdir() if p.suffix in SUFFIXES - {""} or p.name == "LICENSE"]
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


def python_files() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".py"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of_test(path: str) -> str:
    """Return the file under src/ that ``tests/a/test_b.py`` mirrors."""
    parts = Path(path).parts
    folder = Path("src", "paralign", *parts[1:-1])
    return str(folder / parts[-1].removeprefix("test_"))


def test_there_is_something_to_look_at():
    assert len(python_files()) > 50


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{name(path)} has {lines} lines: give its second idea a file"


def test_text_is_plain_ascii():
    wrong = [name(path) for path in text_files() if not path.read_bytes().isascii()]
    assert wrong == []


def test_tests_mirror_modules():
    tests = [name(path) for path in (ROOT / "tests").rglob("test_*.py")]
    lost = [
        f"{test}: there is no {module_of_test(test)}"
        for test in tests
        if test not in WITHOUT_MODULE
        and Path(test).parts[1] not in WITHOUT_MIRROR
        and not (ROOT / module_of_test(test)).is_file()
    ]
    assert lost == []


def test_a_test_in_the_wrong_place_is_caught():
    assert module_of_test("tests/launch/test_world.py") == "src/paralign/launch/world.py"
    assert not (ROOT / module_of_test("tests/launch/test_mesh.py")).is_file()


def test_no_room_is_a_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [name(p) for p in (ROOT / "src").rglob("*.py") if p.name in drawers] == []


def test_init_files_only_export():
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr, ast.If)
    for path in (ROOT / "src" / "paralign").glob("*/**/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
            assert lazy or isinstance(node, allowed), f"{name(path)}:{node.lineno} is logic"
