"""Who may import whom: the arrows between rooms, and what stays in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "paralign"
FILES = sorted(SRC.rglob("*.py"))

# From bottom to top. A room imports from the rows above its own, and from itself.
ARROWS = [
    {"errors"},
    {"requirements", "mesh", "layout", "collectives", "randomness", "loss"},
    {"launch", "blueprint", "align"},
    {"testing", "parallel"},
    {"models", "batch"},
    {"program"},
    {"parallelize"},
    {"declaration", "train"},
    {"config"},
    {"prove"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# Rooms that must stay useful alone, and all they may import besides themselves.
ALONE = {"align": {"errors", "layout"}, "launch": {"errors", "requirements"}}

# Files of parallel/ know nothing of each other, except those that make up one axis.
AXES = [
    {"context", "context_"},
    {"pipeline", "stage", "stages", "support", "tied", "gradients"},
]

# The only files that import private modules of torch, and what for.
PRIVATE_TORCH = {
    "models/compose.py": "torch.utils._pytree",  # compare nested outputs of any shape
    "parallel/context_guards.py": "torch._subclasses",  # a fake tensor has no values to check
}


def imports(source: str) -> Iterator[str]:
    """Return the modules that ``source`` imports when it runs, also inside functions."""
    tree = ast.parse(source)
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """Return the room of ``paralign.room.file.name``, or an empty string for the package itself."""
    rooms = set().union(*ARROWS)
    part = [*module.split("."), ""][1]
    return part if part in rooms else ""


def wrong_arrows(own: str, source: str) -> list[str]:
    """Return the imports of a file in room ``own`` that point the wrong way."""
    [row] = [i for i, rooms in enumerate(ARROWS) if own in rooms]
    below = set().union(*ARROWS[:row])
    allowed = ALONE.get(own, below) | {own, ""}
    ours = [name for name in imports(source) if name.split(".")[0] == "paralign"]
    return [name for name in ours if room(name) not in allowed]


def wrong_neighbours(file: str, source: str) -> list[str]:
    """Return the other axes of parallel/ that the file called ``file`` imports."""
    axis = [names for names in AXES if belongs(file, names)] or [{file}]
    others = {path.stem for path in (SRC / "parallel").glob("*.py")} - {"__init__"}
    used = {name.split(".")[2] for name in imports(source) if name.startswith("paralign.parallel.")}
    return sorted(other for other in used & others if not belongs(other, axis[0]))


def belongs(file: str, names: set[str]) -> bool:
    """Tell whether a file is one of ``names``; ``context_`` stands for all that start with it."""
    return file in names or any(name.endswith("_") and file.startswith(name) for name in names)


def private_torch(source: str) -> list[str]:
    """Return the private modules of torch that ``source`` imports."""
    names = [name for name in imports(source) if name.split(".")[0] == "torch"]
    return [name for name in names if any(part.startswith("_") for part in name.split(".")[:-1])]


def uses_cuda(source: str) -> bool:
    """Tell whether ``source`` speaks to one kind of accelerator directly."""
    attributes = [ast.unparse(n) for n in ast.walk(ast.parse(source)) if type(n) is ast.Attribute]
    return any(name.startswith("torch.cuda") for name in [*attributes, *imports(source)])


def rooms_of_files() -> dict[Path, str]:
    return {path: path.relative_to(SRC).with_suffix("").parts[0] for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_point_one_way(path):
    if path == SRC / "__init__.py":
        return  # names every room, but imports each only when it is used
    assert wrong_arrows(rooms_of_files()[path], path.read_text()) == []


def test_every_room_has_a_row():
    assert set(rooms_of_files().values()) - {"__init__"} == set().union(*ARROWS)


def test_axes_do_not_import_each_other():
    files = [path for path in (SRC / "parallel").glob("*.py") if path.stem != "__init__"]
    assert len(files) > 5
    for path in files:
        assert wrong_neighbours(path.stem, path.read_text()) == [], path.name


def test_private_torch_stays_in_the_files_that_say_why():
    found = {str(p.relative_to(SRC)): private_torch(p.read_text()) for p in FILES}
    used = {name: modules for name, modules in found.items() if modules}
    assert used.keys() == PRIVATE_TORCH.keys()
    for name, modules in used.items():
        assert all(module.startswith(PRIVATE_TORCH[name]) for module in modules), name


def test_only_one_file_knows_about_cuda():
    users = {str(path.relative_to(SRC)) for path in FILES if uses_cuda(path.read_text())}
    assert users <= {"launch/device.py"}


def test_a_forbidden_import_is_caught():
    assert wrong_arrows("mesh", "from paralign.parallelize import parallelize") == [
        "paralign.parallelize.parallelize"
    ]
    assert wrong_arrows("align", "def f():\n    import paralign.mesh") == ["paralign.mesh"]
    assert wrong_arrows("align", "from paralign.layout import local_boxes") == []
    assert wrong_neighbours("data", "from paralign.parallel.context import x") == ["context"]
    assert wrong_neighbours("context", "from paralign.parallel.context_rules import x") == []
    assert private_torch("from torch.distributed.fsdp._fully_shard import x") == [
        "torch.distributed.fsdp._fully_shard.x"
    ]
    assert uses_cuda("import torch\ntorch.cuda.synchronize()")
    assert uses_cuda("from torch import cuda")


@pytest.mark.parametrize(
    "statement", ["import paralign", "import paralign; paralign.Degrees(pp=2)"]
)
def test_importing_the_package_loads_neither_torch_nor_pydantic(statement):
    heavy = "[m for m in ('torch', 'numpy', 'pydantic', 'typer', 'rich') if m in sys.modules]"
    code = f"import sys; {statement}; print({heavy})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
