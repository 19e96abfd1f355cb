"""Compiled blocks: names stay, and so does every number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.config.compile_rules import compile_problems as config_problems
from paralign.errors import ConfigError
from paralign.parallel.compiled import Compile, apply_compile, check_compiler, modules_outside
from paralign.parallel.stage import Stage
from paralign.parallel.support import Plan, problems
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics
from tests.equivalence.test_moe import MODELS
from tests.parity import BASE, check_result, make_config, measure_all

DROPOUT = {"model": {**BASE["model"], "dropout": 0.2}}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.traced: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.traced.append(torch.compiler.is_compiling())
        return torch.relu(self.outer(torch.relu(self.inner(x))))


# The engine's own look at a tensor between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_layer_keeps_its_names_and_what_it_computes():
    layer, x = Layer().double(), torch.randn(3, 4, dtype=torch.float64)
    names, expected = list(layer.state_dict()), layer(x)
    assert apply_compile(layer, Compile()).traced == [False]
    apply_compile(layer, Compile("aot_eager"), outside=["outer"])
    out = layer(x)
    assert torch.equal(out, expected) and list(layer.state_dict()) == names
    out.sum().backward()
    assert layer.inner.weight.grad is not None


def test_what_holds_experts_and_cores_stays_outside():
    stacks = ["layers.1.ffn.experts", "layers.10.ffn.experts"]
    assert modules_outside("layers.1", ["attention.core"], stacks) == ["attention.core", "ffn"]
    assert modules_outside("layers.2", ["attention.core"], stacks) == ["attention.core"]
    assert modules_outside("layers.1", [], ["layers.1.experts"]) == ["experts"]


def test_a_machine_without_a_compiler_is_refused_only_where_one_is_needed(monkeypatch):
    with pytest.raises(ConfigError, match=r"backend=.sleep. is not known\. Use one of none, ind"):
        check_compiler(Compile("sleep"), "cpu")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"there is no compiler \(g\+\+, clang\+\+ or what CXX"):
        check_compiler(Compile("inductor"), "cpu")
    check_compiler(Compile("inductor"), "cuda")
    check_compiler(Compile("aot_eager"), "cpu")


def test_a_schedule_that_splits_the_backward_pass_is_refused():
    plan = Plan(schedule="ZBVZeroBubble", num_microbatches=2, pp=1, wrap="root", compiles=True)
    (problem,) = problems(plan)
    assert "runs the graphs of a compiled layer twice" in problem
    assert problems(replace(plan, schedule="Interleaved1F1B", compiles=True)) == []


def test_what_a_graph_cannot_hold_is_refused_in_the_config():
    config = make_config()
    changed = {
        "compile": config.compile.model_copy(update={"backend": "inductor"}),
        "mesh": config.mesh.model_copy(update={"tp": 2}),
        "recompute": config.recompute.model_copy(update={"parts": ("ffn",)}),
        "align": config.align.model_copy(update={"record": "activations"}),
    }
    assert list(config_problems(config)) == []
    found = list(config_problems(config.model_copy(update=changed)))
    assert [problem.split(":")[0] for problem in found] == [
        "compile.backend=inductor and mesh.tp=2",
        "compile.backend=inductor and recompute.parts=['ffn']",
        "compile.backend=inductor and align.record=activations",
    ]


@pytest.mark.ranks
def test_what_a_graph_cannot_hold_is_refused_by_parallelize():
    with pytest.raises(ConfigError) as caught:
        run_on_ranks(_build_what_is_refused, 2)
    for text in ("axis 'tp' has 2 ranks", "recompute parts=['ffn']", "(layers.0.ffn)"):
        assert text in str(caught.value)


def _build_what_is_refused() -> None:
    config = make_config(
        mesh={"tp": 2},
        recompute={"parts": ["ffn"]},
        fsdp={"wrap": [["embedding"], ["layers.0.ffn"], ["layers.1"]]},
    )
    section = config.compile.model_copy(update={"backend": "aot_eager"})
    config = config.model_copy(update={"compile": section})
    build_program(config, numerics("float64", config))


# Each line is one world.
RUNS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "pp, fsdp": ({"pp": 2, "dp_shard": 2}, [{**DROPOUT, "align": {"steps": 2}}]),
    "interleaved, recomputed": (
        {"pp": 2, "dp_shard": 2},
        [{"pipeline": {"schedule": "Interleaved1F1B"}, "recompute": {"parts": "block"}}],
    ),
    "cp, experts": (
        {"dp_shard": 2, "cp": 2, "ep": 2},
        [{"model": {**MODELS["pangu_moe"], "dropout": 0.2}}],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("pp, fsdp", "aot_eager", marks=pytest.mark.long),
        pytest.param("pp, fsdp", "inductor", marks=pytest.mark.long),
        pytest.param("interleaved, recomputed", "aot_eager", marks=pytest.mark.long),
        pytest.param("interleaved, recomputed", "inductor", marks=pytest.mark.long),
        pytest.param("cp, experts", "aot_eager", marks=pytest.mark.long),
        pytest.param("cp, experts", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_are_the_same_training_run_as_one_device(name, backend):
    mesh, runs = RUNS[name]
    configs = [make_config(mesh=mesh, compile={"backend": backend}, **one) for one in runs]
    for result in measure_all(configs, timeout=500):
        check_result(result)


@pytest.mark.long
@pytest.mark.ranks
def test_layers_share_their_graphs_and_validation_has_its_own():
    # Before and after attention, for the first layer and for the others.
    assert run_on_ranks(_count_graphs, 1) == [(4, 4, 8)]


def _count_graphs() -> tuple[int, int, int]:
    """Return layers, graphs after two training steps, and after a validation."""
    from torch._dynamo.utils import counters

    config = make_config(**DROPOUT, compile={"backend": "aot_eager"})
    program = build_program(config, numerics("float64", config))
    data = build_data(config)
    for number in range(2):
        program.step(program.shard(data.global_batch(number)))
    after = counters["stats"]["unique_graphs"]
    program.evaluate(program.shard(data.global_batch(2)))
    [stage] = program.modules
    assert isinstance(stage, Stage)
    return len(stage.layer_names), after, counters["stats"]["unique_graphs"]
