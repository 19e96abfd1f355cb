"""Every rule of the equivalence contract, broken on purpose, is caught by record and compare."""

from __future__ import annotations

import pytest

from paralign.align import compare
from paralign.errors import DataError, LayoutError
from paralign.launch import run_ranks
from paralign.parallel.context import ContextParallel
from paralign.prove.reference import run_reference
from paralign.train.build import numerics
from tests.equivalence.broken import run_broken
from tests.parity import make_config

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def config():
    return make_config(
        mesh={"pp": 2, "dp_shard": 2, "cp": 2},
        # Features of a head must divide by cp, so that cutting them is possible at all.
        model={"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2},
    )


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "reference"
    run_ranks(run_reference, 1, config, numerics("float64", config), folder)
    return folder


@pytest.fixture
def judge(config, reference, tmp_path):
    def run(name):
        degrees = config.mesh.degrees
        run_ranks(run_broken, 8, name, config, tmp_path / name, describe=degrees.describe_rank)
        return compare(reference, tmp_path / name)

    return run


def out_of_budget(report, kind):
    return {row.name for row in report.tensors if row.kind == kind and not row.ok}


def test_the_unbroken_run_is_aligned(judge):
    report = judge("nothing")
    assert report.verdict == "aligned", report.why


def test_heads_and_features_mixed_up_are_refused_and_caught_without_guards(judge):
    with pytest.raises(LayoutError, match="head_dim=3"):
        ContextParallel(seq_dim=2, head_dim=3)
    report = judge("feature_axis_for_heads")
    assert report.verdict == "misaligned"
    assert "layers.0.attention.wq.weight" in out_of_budget(report, "grad")


@pytest.mark.long
def test_cp_left_out_of_the_fsdp_mesh_is_caught(judge):
    report = judge("cp_left_out_of_the_fsdp_mesh")
    assert report.verdict == "misaligned"
    everything = {row.name for row in report.tensors if row.kind == "grad"}
    assert out_of_budget(report, "grad") == everything  # every gradient lacks the other slice
    assert out_of_budget(report, "loss") == set()  # and the loss does not show it


@pytest.mark.long
def test_whole_sequences_where_slices_are_due_are_refused(judge):
    with pytest.raises(DataError, match="valid tokens"):
        judge("whole_sequences")


def test_layers_remapped_by_rank_over_dp_size_are_caught(judge):
    report = judge("layers_remapped_by_rank_over_dp_size")
    assert report.verdict == "misaligned"
    found = [finding for finding in report.findings if finding.cause == "wrong_layer"]
    assert found and found == report.findings[: len(found)]  # nothing else comes first
    assert {finding.component for finding in found} == {"weights"}


def test_a_mean_of_micro_batch_means_is_caught(judge):
    report = judge("mean_of_micro_batch_means")
    assert report.verdict == "misaligned"
    assert out_of_budget(report, "loss")
    assert out_of_budget(report, "grad")


@pytest.mark.long
def test_labels_shifted_after_the_split_are_caught(judge):
    report = judge("labels_shifted_after_the_split")
    assert report.verdict == "misaligned"
    assert out_of_budget(report, "loss")


def test_a_head_gradient_without_one_micro_batch_is_caught_and_named(judge):
    report = judge("head_without_one_micro_batch")
    assert report.verdict == "misaligned"
    assert out_of_budget(report, "grad") == {"head.weight"}


def test_embedding_norm_and_head_outside_every_unit_are_caught_and_named(judge):
    report = judge("ends_outside_every_unit")
    assert report.verdict == "misaligned"
    ends = {"embedding.weight", "norm.weight", "head.weight", "head.bias"}
    assert out_of_budget(report, "grad") == ends
