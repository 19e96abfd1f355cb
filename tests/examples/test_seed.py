"""Public reports replayed: every mistake in them is named by the tool."""

from __future__ import annotations

import pytest

from examples.seed import four_faults, low_loss, moe_demo
from tests.examples.replay import Verdict, compare, inspect, record_parallel, record_reference

pytestmark = pytest.mark.ranks


def named(verdict: Verdict) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return component, cause and axes of every finding."""
    return [(f["component"], f["cause"], tuple(f["axes"])) for f in verdict.findings]


REMAP = ("weights", "wrong_layer", ("pp",))
SLICES = ("data", "full_sequence", ("cp",))
HEAD_DIM = ("forward", "wrong_axis", ("cp",))
ROOT = ("reduction", "missing_reduction", ("dp", "cp"))


def test_four_faults_at_once_are_peeled_in_order(tmp_path):
    reference = record_reference(four_faults, tmp_path)

    # All four at once. Attention is wrong twice over, which only a run with slices can tell apart.
    verdict = compare(reference, record_parallel(four_faults, 8, tmp_path, "all"))
    assert verdict.status == 1, verdict.told
    found = named(verdict)
    assert found[:3] == [REMAP] * 3, verdict.told
    assert found[3] == SLICES, verdict.told
    # Ranks of cp have the same whole sequences, so that only dp shows what is not reduced.
    assert found[4:] == [("reduction", "missing_reduction", ("dp",))], verdict.told

    remaps = [each["evidence"] for each in verdict.findings[:3]]
    wrong = {
        (rank, told["called"], told["layer"], told["holds"])
        for told in remaps
        for rank in told["ranks"]
    }
    # (rank, its own name, what the rule makes of it, what it is): 0 and 1 are right.
    assert wrong == {
        *((rank, "layers.0", "layers.1", "layers.0") for rank in (2, 3)),
        *((rank, "layers.1", "layers.1", "layers.3") for rank in (4, 5, 6, 7)),
        *((rank, "layers.0", "layers.3", "layers.2") for rank in (6, 7)),
    }

    # The first two findings are mended, and what they hid comes out.
    fixed = ("remap", "slices")
    verdict = compare(reference, record_parallel(four_faults, 8, tmp_path, "two", fixed=fixed))
    assert named(verdict) == [HEAD_DIM, ROOT], verdict.told
    first, second = verdict.findings
    assert first["tensor"] == "layers.0.attention.core"
    assert set(second["evidence"]["names"]) == {
        "embedding.weight",
        "final_norm.weight",
        "lm_head.weight",
    }

    everything = four_faults.FAULTS
    clean = record_parallel(four_faults, 8, tmp_path, "clean", fixed=everything)
    verdict = compare(reference, clean)
    assert (verdict.status, verdict.findings) == (0, []), verdict.told
    assert inspect(clean).status == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "expected"),
    [("remap", REMAP), ("slices", SLICES), ("head_dim", HEAD_DIM), ("root", ROOT)],
)
def test_each_of_the_four_is_named_alone(fault, expected, tmp_path):
    reference = record_reference(four_faults, tmp_path)
    fixed = tuple(name for name in four_faults.FAULTS if name != fault)
    verdict = compare(reference, record_parallel(four_faults, 8, tmp_path, "one", fixed=fixed))
    assert verdict.status == 1, verdict.told
    assert set(named(verdict)) == {expected}, verdict.told


LOW_LOSS = {
    "micro_means": (1, ("loss", "token_weighting", ()), "loss"),
    "idle_ranks": (1, ("loss", "reported_value", ("pp",)), "loss"),
    "ends_unreduced": (1, ("reduction", "missing_reduction", ("dp",)), "head.weight"),
    # Runs that start from different weights cannot be compared, so nothing is said of the rest.
    "stage_seed": (4, ("weights", "rng", ("pp",)), "layers.2.attention.wq.weight"),
    "no_mask": (1, ("forward", "mask_or_positions", ()), "layers.2.attention.wo"),
}


def test_every_cause_of_a_lower_loss_is_tested():
    assert set(LOW_LOSS) == set(low_loss.FAULTS)


@pytest.fixture(scope="module")
def low_loss_reference(tmp_path_factory):
    return record_reference(low_loss, tmp_path_factory.mktemp("low_loss"))


def test_a_loss_that_is_right_has_no_findings(low_loss_reference, tmp_path):
    verdict = compare(low_loss_reference, record_parallel(low_loss, 6, tmp_path, "clean"))
    assert (verdict.status, verdict.findings) == (0, []), verdict.told


@pytest.mark.parametrize("fault", LOW_LOSS)
def test_a_lower_loss_is_explained_whatever_its_cause(fault, low_loss_reference, tmp_path):
    status, first, tensor = LOW_LOSS[fault]
    trace = record_parallel(low_loss, 6, tmp_path, fault, fault=fault)
    verdict = compare(low_loss_reference, trace)
    assert verdict.status == status, verdict.told
    assert named(verdict)[0] == first, verdict.told
    assert verdict.findings[0]["tensor"] == tensor, verdict.told


MOE = {
    "experts": (("forward", "missing_reduction", ("ep",)), "layers.0.moe"),
    "attention": (("forward", "missing_reduction", ("tp",)), "layers.0.attention"),
}


def test_every_mistake_of_the_demo_is_tested():
    assert set(MOE) == set(moe_demo.FAULTS)


def test_sums_that_the_demo_forgets_are_named(tmp_path):
    reference = record_reference(moe_demo, tmp_path)
    verdict = compare(reference, record_parallel(moe_demo, 4, tmp_path, "clean"))
    assert (verdict.status, verdict.findings) == (0, []), verdict.told
    for fault, (only, tensor) in MOE.items():
        verdict = compare(reference, record_parallel(moe_demo, 4, tmp_path, fault, fault=fault))
        assert verdict.status == 1, verdict.told
        assert named(verdict) == [only], verdict.told
        assert verdict.findings[0]["tensor"] == tensor, verdict.told
