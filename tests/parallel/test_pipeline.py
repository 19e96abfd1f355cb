from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.mesh import build_mesh
from paralign.parallel.pipeline import Pipeline
from paralign.parallel.stage import Stage
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics
from tests.parity import make_config

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def test_only_the_schedule_may_be_given_by_place():
    assert Pipeline("GPipe") == Pipeline(
        schedule="GPipe", num_microbatches=1, stages_per_rank=None, layers_per_stage=None
    )
    with pytest.raises(TypeError):
        Pipeline("GPipe", 4)  # type: ignore[call-arg]


def run_all(schedules: list[str]) -> list[dict[str, Any]]:
    """Return what each of this rank's stages saw in two steps of every schedule."""
    mesh, outcomes = None, []
    for name in schedules:
        config = make_config(
            mesh={"pp": 2},
            pipeline={"schedule": name, "num_microbatches": 4},
            batch={"global_batch": 8, "seq_len": 8},
        )
        mesh = mesh or build_mesh(config.mesh.degrees)
        program = build_program(config, numerics("float64", config), mesh=mesh)
        calls: dict[str, list[tuple[int, ...]]] = {}
        graded: list[bool] = []
        for module in program.modules:
            watch(module, calls, graded)
        runtime = program._runtime
        results: list[Tensor | None] = []
        real = runtime.step

        def step(*args: Any, real: Any = real, results: Any = results, **rest: Any) -> Any:
            results.append(real(*args, **rest))
            return results[-1]

        runtime.step = step  # type: ignore[method-assign]
        data = build_data(config)
        losses = [float(program.step(program.shard(data.global_batch(n)))) for n in range(2)]
        outcomes.append(
            {
                "calls": calls,
                "graded": graded,
                "holds_loss": [result is not None for result in results],
                "local": [None if r is None else (float(r), r.requires_grad) for r in results],
                "losses": losses,
                "num_schedules": len(runtime._schedules),
            }
        )
    return outcomes


def watch(stage: nn.Module, calls: dict[str, list[tuple[int, ...]]], graded: list[bool]) -> None:
    assert isinstance(stage, Stage)
    name = stage.layer_names[0]

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        calls.setdefault(name, []).append(tuple(args[0].shape))
        shapes = {key: tuple(value.shape) for key, value in kwargs.items()}
        # Every tensor is cut into the same rows.
        assert shapes == dict.fromkeys(("tokens", "labels", "positions"), (2, 8)), shapes
        assert torch.equal(kwargs["positions"][0], torch.arange(8))
        graded.append(torch.is_grad_enabled())

    stage.register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.ranks
def test_each_stage_runs_each_micro_batch_once_and_the_last_one_holds_the_loss():
    first, second = run_on_ranks(run_all, 2, SCHEDULES)
    for name, mine, theirs in zip(SCHEDULES, first, second, strict=True):
        virtual = name not in ("GPipe", "1F1B")
        is_v = name in ("ZBVZeroBubble", "DualPipeV")
        for rank, seen in enumerate((mine, theirs)):
            # Four micro-batches of two rows, two steps, and no forward to find out shapes.
            assert len(seen["calls"]) == (2 if virtual else 1), name
            for layer, shapes in seen["calls"].items():
                entry = (2, 8) if layer == "layers.0" else (2, 8, 32)
                assert shapes == [entry] * 8, (name, rank, layer)
            assert all(seen["graded"])
            holds = rank == (0 if is_v else 1)
            assert seen["holds_loss"] == [holds, holds]
            assert seen["num_schedules"] == 1
        assert mine["losses"] == theirs["losses"]
        (local,) = [s["local"] for s in (mine, theirs) if s["holds_loss"][0]]
        assert local == [(loss, False) for loss in mine["losses"]]
    # The same data and weights: schedules only change the order of sums.
    for losses in zip(*(seen["losses"] for seen in first), strict=True):
        assert max(losses) - min(losses) <= 1e-14 * max(losses)


def shapes_of_schedules() -> list[int]:
    config = make_config(
        mesh={"pp": 2},
        pipeline={"schedule": "1F1B", "num_microbatches": 2},
        batch={"global_batch": 4, "seq_len": 8},
    )
    program = build_program(config, numerics("float64", config))
    counts = []
    for rows, seq_len in ((4, 8), (4, 6), (2, 8), (4, 8), (4, 6)):
        tokens = torch.arange(rows * seq_len).view(rows, seq_len)
        program.step(program.shard({"tokens": tokens}))
        counts.append(len(program._runtime._schedules))
    return counts


@pytest.mark.ranks
def test_a_schedule_is_built_once_for_each_shape():
    assert run_on_ranks(shapes_of_schedules, 2) == [[1, 2, 3, 3, 3]] * 2
