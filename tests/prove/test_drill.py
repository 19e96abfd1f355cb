from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import paralign
from paralign.config.load import load_config
from paralign.errors import ConfigError
from paralign.prove.drill import drill
from tests.parity import make_config

pytestmark = pytest.mark.ranks

OWN = """\
import torch.distributed as dist
import paralign as pa


@pa.fault(component="data", cause="different_data")
def own_nothing(run):
    '''Nothing changes, in the last bit.'''
    run.on_batch(lambda batch: batch)


@pa.fault(component="backward", cause="single_rank")
def own_collapse(run):
    '''The run does not come to its end.'''
    if dist.get_rank() == 1:
        raise RuntimeError("the last rank falls over")


@pa.fault(component="optimizer", cause="different_config")
def own_patch(run):
    '''Patches are taken back: the faults after this one are not affected.'''
    run.patch(run.program, "clip_grad_norm_", lambda largest: run.program.grad_norm() * 0 + 1)
"""


@pytest.fixture(scope="module")
def config():
    return make_config(
        mesh={"cp": 2},
        model={"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 16, "bias": False},
        pipeline={"num_microbatches": 3},
        batch={"global_batch": 6, "seq_len": 16},
    )


@pytest.fixture(scope="module")
def report(config, tmp_path_factory):
    file = tmp_path_factory.mktemp("faults") / "own.py"
    file.write_text(OWN)
    names = ["own_", "cp_is_left_out", "averaged_over_cp", "reported_loss_is_smoothed"]
    return drill(config, faults=file, only=names)


def test_the_run_without_a_fault_is_aligned(report):
    assert report.clean.verdict == "aligned", report.clean.why


def test_faults_are_caught_and_named(report):
    words = {outcome.fault.name: outcome.word for outcome in report.outcomes}
    assert words["cp_is_left_out_of_the_fsdp_mesh"] == "right"
    assert words["averaged_over_cp"] == "right"
    assert words["reported_loss_is_smoothed"] == "right"


def test_a_fault_that_changes_no_number_is_inert(report):
    (nothing,) = [o for o in report.outcomes if o.fault.name == "own_nothing"]
    assert (nothing.inert, nothing.caught) == (True, False)


def test_a_fault_that_ends_the_run_is_caught_by_its_error(report):
    (fell,) = [o for o in report.outcomes if o.fault.name == "own_collapse"]
    assert fell.caught
    assert "the last rank falls over" in str(fell.error)
    assert report.exit_status == 0


def test_the_json_fits_its_schema(report):
    schemas = {
        path.name: json.loads(path.read_text())
        for path in (Path(paralign.__file__).parent / "align" / "schema").glob("*.json")
    }
    registry = Registry().with_resources(
        (name, Resource.from_contents(schema)) for name, schema in schemas.items()
    )
    validator = Draft202012Validator(schemas["drill.schema.json"], registry=registry)
    assert list(validator.iter_errors(json.loads(report.to_json()))) == []


def test_a_name_that_no_fault_has_is_refused(config):
    with pytest.raises(ConfigError, match="--only='no_such_fault'"):
        drill(config, only=["no_such_fault"])


def test_a_config_that_no_fault_fits_is_refused(config):
    with pytest.raises(ConfigError, match="lacks pp"):
        drill(config, only=["each_stage_clips"])


COMPONENT, CAUSE = 0.95, 0.85  # shares of what is caught that must be right
# torch's own check of recomputed tensors ends this run, which names no component.
ENDED_BY_ITSELF = {"experts_are_chosen_anew_in_the_recomputation"}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "drill"


@pytest.mark.long
def test_faults_on_an_example_are_caught_and_right(tmp_path):
    names = [
        "same_rows_on_every_replica",
        "mean_over_each_dp_shard_ranks_own_tokens",
        "norm_of_the_own_shards",
    ]
    config = load_config(EXAMPLES / "replicas_shards.yaml", ["align.steps=1"])
    first = drill(config, only=names, trace=tmp_path)
    assert first.clean.verdict == "aligned", first.clean.why
    assert {o.fault.name: o.word for o in first.outcomes} == dict.fromkeys(names, "right")

    # What was recorded is judged again, not made again.
    said: list[str] = []
    again = drill(config, only=names, trace=tmp_path, progress=said.append)
    assert again.summary == first.summary
    assert not any("runs on 6 ranks" in text for text in said)


MODEL = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "bias": False}
SMALL = {
    "model": MODEL,
    "pipeline": {"num_microbatches": 2},
    "batch": {"global_batch": 4, "seq_len": 16},
    "align": {"record": "activations"},
}


EXPERTS = {**MODEL, "num_experts": 8, "expert_hidden_size": 8}


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (
            {
                "mesh": {"dp_shard": 2, "tp": 2, "ep": 4},
                "model": {**EXPERTS, "balance_loss": 0.02},
            },
            [
                "attention_output_is_not_summed_over_tp",
                "routers_are_not_summed_over_tp",
            ],
        ),
        pytest.param(
            {
                "mesh": {"dp_shard": 2, "tp": 2, "ep": 4},
                "model": {**EXPERTS, "balance_loss": 0.02},
            },
            [
                "loss_is_averaged_over_tp",
                "one_config_object_is_shared_by_two_models",
                "the_balance_loss_is_off",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"mesh": {"tp": 4}},
            [
                "slices_gathered_in_another_order",
                "key_heads_are_tiled_instead_of_repeated",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"mesh": {"dp_shard": 2, "cp": 2, "ep": 4}, "model": EXPERTS},
            [
                "experts_are_not_combined_over_ep",
                "one_expert_gets_no_tokens",
                "tokens_beyond_the_capacity_are_dropped",
                "expert_gradients_are_scaled_by_ep",
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["tp ep", "losses", "tp", "ep"],
)
def test_faults_of_a_layer_are_found_in_its_outputs(sections, names):
    report = drill(make_config(**{**SMALL, **sections}), only=names)
    assert report.clean.verdict == "aligned", report.clean.why
    assert {o.fault.name: o.word for o in report.outcomes} == dict.fromkeys(names, "right")


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_fault_on_the_examples(path):
    """As ``python -m bench.drill`` does for docs/drill.md."""
    report = drill(load_config(path))
    numbers = report.summary
    assert report.clean.verdict == "aligned", report.clean.why
    assert {o.fault.name for o in report.outcomes if o.error is not None} <= ENDED_BY_ITSELF
    assert numbers["caught"] == numbers["active"] > 30
    assert numbers["component_and_axes"] >= COMPONENT * numbers["active"]
    assert numbers["cause"] >= CAUSE * numbers["active"]
