from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paralign.errors import TrainingError
from paralign.launch import report_event, run_ranks
from paralign.local_weights import local_of
from paralign.mesh import build_mesh
from paralign.models.router import named_biases
from paralign.program import Program
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, training_numerics
from paralign.train.loop import Ended, run_training
from paralign.train.optimizer import build_optimizer
from paralign.train.replicas import find_differences
from tests.equivalence.test_moe import MODELS
from tests.parity import make_config
from tests.train.runs import newest, training_config

pytestmark = pytest.mark.ranks

NORM, UP = "layers.1.ffn_norm.weight", "layers.1.ffn.up.weight"
HEAD, BIAS = "head.weight", "layers.3.ffn.router.bias"
# Which rank has another bit in what, and what is said of it.
REPLICATED = [
    (3, "parameter", UP, f"parameter {UP} over axis 'dp_replicate': [rank 3: dp_replicate=1 tp=1]"),
    (2, "gradient", UP, f"gradient {UP} over axis 'dp_replicate': [rank 2: dp_replicate=1 tp=0]"),
    (1, "parameter", NORM, f"parameter {NORM} over axis 'tp': [rank 1: dp_replicate=0 tp=1]"),
    (1, "gradient", NORM, f"gradient {NORM} over axis 'tp': [rank 1: dp_replicate=0 tp=1]"),
]
STAGED = [
    (2, "parameter", HEAD, f"parameter {HEAD} (tied to embedding.weight) over axis 'pp': [rank 2"),
    (3, "gradient", HEAD, f"gradient {HEAD} (tied to embedding.weight) over axis 'pp': [rank 3"),
    (3, "bias", BIAS, f"router bias {BIAS} over axis 'routed': [rank 3"),
]


def _tensor(program: Program, kind: str, name: str) -> Tensor | None:
    """Return what this rank holds of a tensor; None: nothing."""
    if kind == "bias":
        return named_biases(program.modules).get(name)
    parameter = dict(program.named_parameters()).get(name)
    if parameter is None:
        return None
    tensor = parameter.grad if kind == "gradient" else parameter.detach()
    assert tensor is not None
    return local_of(tensor)


def _look(config: Any, faults: list[tuple[int, str, str, str]]) -> list[list[str]]:
    program = build_program(config, training_numerics(config), mesh=build_mesh(config.mesh.degrees))
    optimizer = build_optimizer(config.optimizer, program.named_parameters())
    data = build_data(config)
    for number in range(2):
        optimizer.zero_grad()
        program.step(program.shard(data.global_batch(number)))
        program.update_routers()
        optimizer.step()
    found = [find_differences(program)]
    for rank, kind, name, _ in faults:
        tensor = _tensor(program, kind, name)
        whole = None if tensor is None else tensor.clone()
        if tensor is not None and dist.get_rank() == rank:
            tensor.view(-1)[0] = tensor.view(-1)[0].nextafter(torch.tensor(1e9, dtype=tensor.dtype))
        found.append(find_differences(program))
        if tensor is not None and whole is not None:
            tensor.copy_(whole)
    return [*found, find_differences(program)]


def _check(config: Any, faults: list[tuple[int, str, str, str]]) -> None:
    by_rank = run_on_ranks(_look, 4, config, faults, timeout=90)
    assert by_rank[1:] == by_rank[:1] * 3  # all say the same
    healthy, *found, again = by_rank[0]
    assert healthy == again == []
    for (_, _, _, said), lines in zip(faults, found, strict=True):
        # What tp does not cut has copies over dp_replicate as well.
        assert len(lines) == (2 if "over axis 'tp'" in said else 1), lines
        assert any(line.startswith(said) for line in lines), lines


SMALL: dict[str, Any] = {
    "pipeline": {"schedule": "GPipe", "num_microbatches": 2},
    "batch": {"global_batch": 4, "seq_len": 16},
}


@pytest.mark.parametrize("is_sequence_cut", [True, False])
def test_copies_over_dp_replicate_and_tp(is_sequence_cut):
    tensor = {"sequence_parallel": is_sequence_cut}
    config = make_config(mesh={"dp_replicate": 2, "tp": 2}, tensor=tensor, **SMALL)
    _check(config, REPLICATED if is_sequence_cut else [])


def test_tied_copies_and_router_biases():
    model = {**MODELS["pangu_moe"], "tie_embeddings": True}
    _check(make_config(mesh={"pp": 2, "dp_shard": 2, "ep": 2}, model=model, **SMALL), STAGED)


def _diverge(config: Any) -> Ended:
    step: Callable[..., Any] = Program.step
    calls = []

    def diverging(self: Program, batch: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and dist.get_rank() == 1:
            held = _tensor(self, "parameter", UP)
            assert held is not None
            held[0, 0] += 1e-9
        return step(self, batch, **options)

    with patch.object(Program, "step", diverging):
        return run_training(config, report_event)


def test_a_run_ends_at_the_next_look_and_names_rank_tensor_and_axis(tmp_path):
    config = training_config(
        tmp_path, mesh={"dp_replicate": 2}, train={"check_every": 2, "save_every": 2}
    )
    with pytest.raises(TrainingError) as error:
        run_ranks(_diverge, 2, config, timeout=60)
    text = str(error.value)
    assert "step 4: copies of a tensor differ between ranks" in text
    line = f"parameter {UP} over axis 'dp_replicate': [rank 1: dp_replicate=1] differs from [rank 0"
    assert line in text
    assert "They were alike after step 1" in text
    assert "Remove checkpoints after it" in text
    assert newest(config).step == 2
