"""Router choices are kept, counted and replayed by the number of the token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paralign as pa
from paralign.config.run import RunConfig
from paralign.loss import Predicted
from paralign.models.moe_sizes import MoeSizes
from paralign.models.router import Router, Routing
from paralign.prove.parallel import run_parallel
from paralign.prove.reference import run_reference
from paralign.prove.routing import (
    RoutingRecorder,
    RoutingTable,
    RoutingWatch,
    count_flipped,
    numbers_of,
    routing_folder,
)
from paralign.testing import run_on_ranks
from paralign.train.build import Numerics, numerics
from tests.equivalence.test_moe import MODELS
from tests.parity import make_config

SIZES = MoeSizes(num_experts=6, top_k=2, router_score="sigmoid", bias_update_speed=0.1)
ROWS, SEQ = 4, 3


def router(seed: int) -> Router:
    torch.manual_seed(seed)
    made = Router(8, SIZES)
    assert made.bias is not None
    torch.nn.init.normal_(made.bias)
    return made


def tokens() -> Tensor:
    return torch.randn(ROWS, SEQ, 8, generator=torch.Generator().manual_seed(3))


def route(router: Router, x: Tensor, numbers: Tensor | None) -> Routing:
    predicted = Predicted(torch.ones(x.shape[:2], dtype=torch.bool), 12.0, numbers)
    found: Routing = router(x, predicted)
    return found


def record(trace: Path, seed: int, replay: RoutingTable | None = None) -> RoutingTable:
    made = router(seed)
    log = RoutingRecorder({"moe": made}, replay, num_tokens=ROWS * SEQ)
    for step in range(2):
        log.begin_step()
        route(made, tokens() + step, torch.arange(12).view(ROWS, SEQ))
    log.write(trace)
    return RoutingTable(trace)


def test_numbers_are_those_of_the_global_batch():
    positions = torch.tensor([[4, 5, 2], [4, 5, 2]])
    assert numbers_of(torch.tensor([1, 3]), positions, 6).tolist() == [[10, 11, 8], [22, 23, 20]]


def test_a_flipped_choice_is_one_whatever_the_order():
    own = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 5, 6]])
    told = torch.tensor([[3, 1, 2], [3, 2, 0], [1, 2, 3]])
    assert count_flipped(own, told) == 0 + 1 + 3


def test_a_run_without_routers_keeps_nothing(tmp_path):
    RoutingRecorder({}, None, num_tokens=3).write(tmp_path / "run")
    assert not RoutingTable(tmp_path / "run").exists
    assert not routing_folder(tmp_path / "run").exists()


def test_choices_are_replayed_and_weighed_by_the_runs_own_scores(tmp_path):
    table = record(tmp_path / "reference", seed=0)
    truth = record(tmp_path / "truth", seed=1, replay=table)
    ours, alone = router(1), router(1)
    watch = RoutingWatch({"moe": ours}, table, truth)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    for step in range(2):
        watch.begin_step()
        x = (tokens() + step).flatten(0, 1)[order].unsqueeze(0)
        for part, numbers in zip(x.chunk(3, 1), order.unsqueeze(0).chunk(3, 1), strict=True):
            indices, weights = route(ours, part, numbers)
            assert torch.equal(indices, table.choices(step, "moe")[numbers])
            scores = alone.gate(part).sigmoid().gather(-1, indices)
            due = scores / scores.sum(-1, keepdim=True)
            assert (weights - due).norm() <= 4 * torch.finfo(due.dtype).eps * due.norm()
            route(ours, part, numbers)  # as a recomputation does: counted once
        own = alone._select(truth.scores(step, "moe"))
        row = watch._rows[step, "moe"]
        flipped = count_flipped(own, table.choices(step, "moe"))
        assert flipped > 0
        assert (row["tokens"], row["choices"]) == (12, 24)
        assert row["flipped"] == row["expected"] == flipped
        assert row["error"] <= 1e-10 < row["own_error"]
    # Nobody told which tokens these are: nothing is replayed or counted.
    assert torch.equal(route(ours, tokens(), None).indices, alone(tokens()).indices)
    assert watch._rows[1, "moe"]["tokens"] == 12


def test_in_float64_choices_are_counted_and_not_replayed(tmp_path):
    table = record(tmp_path / "reference", seed=0)
    ours, alone = router(1), router(1)
    watch = RoutingWatch({"moe": ours}, table, None)
    watch.begin_step()
    found = route(ours, tokens(), torch.arange(12).view(ROWS, SEQ))
    assert torch.equal(found.indices, alone(tokens()).indices)
    row = watch._rows[0, "moe"]
    assert (row["expected"], row["own_error"]) == (0, 0.0)
    assert row["flipped"] > 0 and row["error"] > 0


def scramble(trace: Path, num_experts: int) -> None:
    """Move every choice to the next expert: one that hardly any router would have selected."""
    path = routing_folder(trace) / "table.safetensors"
    kept = load_file(path)
    save_file(
        {
            key: (values + 1) % num_experts if key.endswith("choices") else values
            for key, values in kept.items()
        },
        path,
    )


# By another name than float64, so that choices are replayed.
EXACT = replace(numerics("float64", make_config()), name="replayed")


def replayed_rank(config: RunConfig, precision: Numerics, folder: Path) -> None:
    run_parallel(config, precision, folder / "parallel", folder)


MESH = {"pp": 2, "dp_shard": 2, "cp": 2}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        (
            "pangu_moe",
            {
                "mesh": {"dp_shard": 2, "cp": 2, "ep": 2},
                "context": {"ulysses_degree": 1, "load_balance": True},
                "recompute": {"parts": "block"},
            },
        ),
        pytest.param("mixtral", {"mesh": MESH}, marks=pytest.mark.long),
        pytest.param("sparse", {"mesh": {"dp_shard": 4, "pp": 2}}, marks=pytest.mark.long),
        pytest.param(
            "mixtral",
            {"mesh": {**MESH, "ep": 4}, "pipeline": {"schedule": "ZBVZeroBubble"}},
            marks=pytest.mark.long,
        ),
    ],
)
def test_any_choices_are_replayed_to_the_same_tokens_on_every_rank(tmp_path, model, sections):
    config = make_config(model=MODELS[model], align={"steps": 2}, **sections)
    run_reference(config, EXACT, tmp_path / "reference")
    scramble(tmp_path / "reference", config.model.hyper_parameters["num_experts"])
    run_reference(config, EXACT, tmp_path / "truth", tmp_path / "reference")
    run_on_ranks(
        replayed_rank, config.mesh.degrees.world_size, config, EXACT, tmp_path, timeout=120
    )
    # The reference's own numbers are those of its own choices.
    report = pa.compare(tmp_path / "truth", tmp_path / "parallel")
    assert report.verdict == "aligned", report.why
    assert pa.compare(tmp_path / "reference", tmp_path / "parallel").verdict == "misaligned"
