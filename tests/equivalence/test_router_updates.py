"""Router biases over several calls of ``step``, in a program's state, and forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.config.run import RunConfig
from paralign.errors import AlignError
from paralign.models.router import named_biases
from paralign.prove.reference import ReferenceStep
from paralign.testing import run_on_ranks
from paralign.train.build import build_pieces, build_program, init_rule, initialise_whole, numerics
from tests.equivalence.test_moe import MODELS
from tests.parity import make_config
from tests.test_program import random_batch

pytestmark = pytest.mark.ranks

BATCHES = [random_batch(seed, 8, 16) for seed in (1, 2)]


def config_of(**pipeline: Any) -> RunConfig:
    return make_config(
        model=MODELS["pangu_moe"],
        mesh={"pp": 2, "dp_shard": 2},
        pipeline={"schedule": "1F1B", "num_microbatches": 2, **pipeline},
    )


def one_device(config: RunConfig) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss of all batches as one, its balance part, and the biases afterwards."""
    precision = numerics("float64", config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    whole = {name: torch.cat([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    step = ReferenceStep(model, blueprint, precision, num_rows=4)
    loss, _ = step(whole)
    plain, _ = ReferenceStep(model.eval(), blueprint, precision, num_rows=4)(whole)
    step.update_routers()
    return float(loss), float(loss - plain), named_biases([model])


def accumulate(config: RunConfig) -> dict[str, Any]:
    program = build_program(config, numerics("float64", config))
    before = {name: value.clone() for name, value in named_biases(program.modules).items()}
    batches = [program.shard(batch) for batch in BATCHES]
    num_tokens = sum(batch.num_global_tokens for batch in batches)
    loss, balance = 0.0, 0.0
    for batch in batches:
        loss += float(program.step(batch, num_tokens=num_tokens))
        parts = program.loss_parts
        balance += parts["balance"]
    state = program.state_dict()
    unchanged = all(torch.equal(state[name], value) for name, value in before.items())
    program.update_routers()
    program.update_routers()  # nothing was counted in between
    return {
        "loss": loss,
        "balance": balance,
        "unchanged": unchanged,
        "biases": {name: state[name] for name in before},
    }


def test_several_steps_move_the_biases_once_by_all_they_counted():
    config = config_of()
    loss, balance, biases = one_device(config)
    for result in run_on_ranks(accumulate, 4, config):
        assert result["unchanged"] and result["biases"]
        for name, bias in result["biases"].items():
            assert torch.equal(bias, biases[name]), name
        assert abs(result["loss"] - loss) <= 1e-14 * loss
        # The difference of two losses, so only to the rounding of these.
        assert abs(result["balance"] - balance) <= 1e-14 * loss
        assert balance > 0


def forget(config: RunConfig) -> str:
    program = build_program(config, numerics("float64", config))
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    batch = program.shard(BATCHES[0])
    program.step(batch)
    program.step(batch)  # accumulates: nothing was forgotten
    program.update_routers()
    optimizer.step()
    program.step(batch)
    optimizer.step()
    try:
        program.step(batch)
    except AlignError as error:
        return str(error)
    return ""


def test_a_forgotten_update_is_noticed():
    # The first stage has the dense layer only: it waits for nobody either.
    for message in run_on_ranks(forget, 4, config_of(layers_per_stage=(1, 3))):
        assert message == (
            "the parameters have moved since the last step, but the router biases have not: "
            "experts would never be balanced. Call program.update_routers() between program.step "
            "and optimizer.step()."
        )


def leave_out(config: RunConfig) -> tuple[bool, bool]:
    program = build_program(config, numerics("float64", config))
    before = {name: value.clone() for name, value in named_biases(program.modules).items()}

    def is_unchanged() -> bool:
        now = named_biases(program.modules)
        return all(torch.equal(now[name], value) for name, value in before.items())

    program.step(program.shard(BATCHES[0]))
    program.forget_routers()
    program.update_routers()
    left_out = is_unchanged()
    program.step(program.shard(BATCHES[1]))
    program.update_routers()
    return left_out, is_unchanged()


def test_a_step_that_is_left_out_moves_no_bias():
    assert run_on_ranks(leave_out, 4, config_of()) == [(True, False)] * 4
