"""Pipeline x FSDP x context parallel on eight ranks: every unit grouping, several steps."""

from __future__ import annotations

import pytest

from tests.parity import BASE, PANGU, check_result, make_config, measure_all

SCHEDULES = (("GPipe", 1), ("GPipe", 2), ("GPipe", 4), ("1F1B", 2), ("1F1B", 4))
WRAPS = ("root", "blocks", "first_block", (("layers.0", "layers.1"), ("norm", "head")))
MODELS = {"llama": BASE["model"], "pangu_moe": PANGU}


def configs(model, part):
    """Every second pair of schedule and grouping: between them the two parts have all."""
    return [
        make_config(
            model=MODELS[model],
            mesh={"pp": 2, "dp_shard": 2, "cp": 2},
            pipeline={"schedule": schedule, "num_microbatches": num_microbatches},
            fsdp={"wrap": wrap},
            align={"steps": 3},
        )
        for i, (schedule, num_microbatches) in enumerate(SCHEDULES)
        for j, wrap in enumerate(WRAPS)
        if (i + j) % 2 == part
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("llama", 0),
        pytest.param("pangu_moe", 1, marks=pytest.mark.long),
        pytest.param("llama", 1, marks=pytest.mark.long),
        pytest.param("pangu_moe", 0, marks=pytest.mark.long),
    ],
)
def test_every_gradient_parameter_update_and_moment_is_that_of_one_device(model, part):
    for result in measure_all(configs(model, part)):
        check_result(result)
        assert result.clipped  # or clipping would not have been tested
        # Every unit that owns a trainable parameter is reduced once; here all units do.
        assert {n for counts in result.reductions for n in counts.values()} == {1}
