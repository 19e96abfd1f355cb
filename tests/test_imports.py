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
    {"errors", "vector_math"},
    {"requirements", "mesh", "layout", "randomness", "loss", "documents"},
    {"collectives", "all_to_all", "checksum", "contiguous", "local_weights", "dropout"},
    {"launch", "blueprint", "align"},
    {"testing", "parallel"},
    {"models", "batch"},
    {"weights", "agreement", "router_updates"},
    {"program"},
    {"planning"},
    {"parallelize", "declaration", "data"},
    {"config"},
    {"train"},
    {"prove"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# Rooms that must stay useful alone, and all they may import besides themselves.
ALONE = {
    "align": {"errors", "layout", "vector_math"},
    "launch": {"errors", "requirements", "vector_math"},
}

# Files of parallel/ know nothing of each other, except those that make up one axis.
AXES = [
    {"context", "context_"},
    {"tensor", "tensor_"},
    {"data", "precision"},
    {"pipeline", "relay", "stage", "stage_clock", "stages", "support", "tied", "gradients"}
    | {"loss_chunks"},
]

# The only files that import private modules of torch, and what for.
PRIVATE_TORCH = {
    "models/compose.py": "torch.utils._pytree",  # compare nested outputs of any shape
    "train/local_shards.py": "torch.utils._python_dispatch",  # see every operation of an optimizer
    "parallel/recompute.py": "torch.utils._pytree",  # find the tensors in arguments of any shape
    "parallel/tensor_tokens.py": "torch.utils._pytree",  # cut the tensors in arguments of any shape
    "parallel/context_guards.py": "torch._subclasses",  # a fake tensor has no values to check
}

# What the recording half uses of torch; all of it is in torch 2.4. A name that is not listed here
# is to be looked up in that version first.
IN_TORCH_2_4 = set(
    """
    Generator Tensor __version__ add bool cat dtype empty empty_like equal float64 full int16 int32
    int64 int8 is_grad_enabled isfinite no_grad ones randint stack tensor where zeros
    _C._current_graph_task_id autograd.backward autograd.grad linalg.vector_norm
    distributed.all_gather_object distributed.get_process_group_ranks distributed.get_rank
    distributed.get_world_size distributed.is_available distributed.is_initialized
    nn.Module nn.ModuleDict nn.ModuleList nn.Parameter nn.utils nn.utils.clip_grad optim.Optimizer
    optim.optimizer.register_optimizer_step_post_hook
    optim.optimizer.register_optimizer_step_pre_hook
    """.split()
)


def recording_half() -> set[Path]:
    """Return the files of align/ that recording and loading use, directly or not."""
    found: set[Path] = set()
    waiting = ["paralign.align.record.x", "paralign.align.initial.x", "paralign.align.weights.x"]
    while waiting:
        path = SRC.parent.joinpath(*waiting.pop().split(".")[:-1]).with_suffix(".py")
        if path.is_file() and path not in found:
            found.add(path)
            waiting += [n for n in imports(path.read_text()) if n.startswith("paralign.align.")]
            # ``from room import file`` names the file itself.
            waiting += [f"{n}.x" for n in imports(path.read_text()) if n.startswith("paralign.")]
    return found


def torch_names(source: str) -> set[str]:
    """Return what ``source`` uses of torch, without ``torch.``; the longest names only."""
    tree = ast.parse(source)
    alias = {"torch": "torch"}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            alias |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            names |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            alias |= {a.asname: a.name for a in node.names if a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in alias and all(part.isidentifier() for part in rest.split(".")):
                names.add(f"{alias[head]}.{rest}")
    ours = {name.removeprefix("torch.") for name in names if name.startswith("torch.")}
    return {name for name in ours if not any(other.startswith(f"{name}.") for other in ours)}


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


def test_recording_uses_nothing_newer_than_torch_2_4():
    files = recording_half()
    assert {"recorder", "watch", "initial", "deepspeed"} <= {path.stem for path in files}
    used = {path.name: torch_names(path.read_text()) for path in files}
    modules = {"nn", "distributed", "optim", "autograd", "Tensor"}
    newer = {
        name: sorted(found - IN_TORCH_2_4 - modules)
        for name, found in used.items()
        if found - IN_TORCH_2_4 - modules
    }
    assert newer == {}


def test_a_newer_name_is_caught():
    code = "import torch\nfrom torch import nn\ntorch.float4(nn.Buffer)"
    assert torch_names(code) == {"float4", "nn.Buffer"}
    assert not torch_names(code) <= IN_TORCH_2_4


WITHOUT_EXTRAS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pydantic", "typer", "rich", "jinja2"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import torch
import paralign as pa

folder = sys.argv[1]
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
with pa.record(folder, model, what=("loss", "norm", "params", "grads", "optimizer")) as rec:
    loss = model(torch.ones(4, 3)).sum()
    loss.backward()
    rec.loss(loss, tokens=4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
assert pa.load_initial(model, folder) == []
print(pa.compare(folder, folder).verdict)
"""


@pytest.mark.filterwarnings("ignore")
def test_recording_needs_only_torch_and_safetensors(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS, str(tmp_path / "t")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "aligned", run.stderr
