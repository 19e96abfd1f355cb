"""Several documents in one row: each is trained as if it stood alone, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align import compare
from paralign.config.run import RunConfig
from paralign.launch import run_ranks
from paralign.prove.reference import ReferenceStep, run_reference
from paralign.train.build import build_data, build_pieces, init_rule, initialise_whole, numerics
from tests.data.texts import write_documents
from tests.equivalence.broken import run_broken
from tests.equivalence.test_moe import MODELS
from tests.parity import GRAD_TOLERANCE, PANGU, check, make_config

# Documents shorter and longer than a row, and some that begin and end with one.
LENGTHS = (7, 2, 41, 16, 16, 3, 3, 60, 5, 9, 13, 2, 2, 150, 33, 20, 4, 90, 11, 70, 8, 64, 30, 49)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, Any]:
    """Return the data section of a run on small documents."""
    folder = tmp_path_factory.mktemp("documents")
    source = write_documents(folder / "text", *LENGTHS)
    tokens = str(folder / "tokens")
    return {"source": str(source), "packing": "isolated", "token_dir": tokens, "padding": 0.25}


def alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give every document of a batch a row of its own, from its first position on."""
    rows: list[tuple[Tensor, Tensor]] = []
    for tokens, labels, numbers in zip(
        *(batch[name] for name in ("tokens", "labels", "documents")), strict=True
    ):
        for number in numbers.unique():
            at = numbers == number
            rows.append((tokens[at], labels[at]))
    seq_len = max(len(tokens) for tokens, _ in rows)
    shape = (len(rows), seq_len)
    made = {"tokens": torch.zeros(shape), "labels": torch.full(shape, -100.0)}
    for index, (tokens, labels) in enumerate(rows):
        made["tokens"][index, : len(tokens)] = tokens
        made["labels"][index, : len(labels)] = labels
    return {name: tensor.long() for name, tensor in made.items()}


def gradients(config: RunConfig, batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    precision = numerics("float64", config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    loss, _ = ReferenceStep(model, blueprint, precision, num_rows=rows)(batch)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **grads}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys() and len(ours) > 10
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


DENSE: dict[str, dict[str, Any]] = {"llama": {}, "pangu": {"model": PANGU}}


@pytest.mark.parametrize("name", DENSE)
def test_one_device_computes_what_each_document_alone_gives(text, name):
    config = make_config(data=text, **DENSE[name])
    batch = build_data(config).global_batch(0)
    assert (batch["documents"].amax(1) > 0).sum() > 4  # many rows have several documents
    expected = gradients(config, alone(batch), 1000)
    assert worst(gradients(config, batch, 4), expected) <= GRAD_TOLERANCE
    # Attention that crosses, and positions that count on, are both far off.
    crossing = {name: batch[name] for name in ("tokens", "labels")}
    assert worst(gradients(config, crossing, 4), expected) > 1e-3


MESHES: dict[str, dict[str, Any]] = {
    "ulysses and tp, recomputed": {
        "mesh": {"cp": 2, "tp": 2},
        "recompute": {"parts": ["attention.core", "*_norm", "attention.project"]},
    },
    "gathered and balanced, with pp": {
        "mesh": {"pp": 2, "cp": 2},
        "context": {"ulysses_degree": 1, "load_balance": True},
    },
    "hybrid and balanced": {
        "mesh": {"cp": 4},
        "context": {"ulysses_degree": 2, "load_balance": True},
    },
    "tp, cp, gathered and balanced, and fsdp": {
        "mesh": {"dp_shard": 2, "cp": 2, "tp": 2},
        "context": {"ulysses_degree": 1, "load_balance": True},
    },
    "tp without sequence parallel, blocks recomputed": {
        "mesh": {"tp": 2, "pp": 2},
        "tensor": {"sequence_parallel": False},
        "recompute": {"parts": "block"},
        "loss": {"chunks": 2},
    },
    "virtual stages": {
        "mesh": {"pp": 2, "dp_replicate": 2},
        "pipeline": {"schedule": "ZBVZeroBubble", "num_microbatches": 4},
        "fsdp": {"wrap": "root"},
    },
}
DEFAULT = {"ulysses and tp, recomputed", "gathered and balanced, with pp"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.long) for n in MESHES]
)
def test_every_mesh_computes_what_one_device_does(text, name):
    check(make_config(data=text, **MESHES[name]))


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("cp", [{"cp": 2}, {"cp": 2, "tp": 2, "ep": 2}], ids=str)
def test_experts_and_latent_attention_too(text, cp):
    config = make_config(data=text, model=MODELS["pangu_moe"], mesh=cp)
    check(config)


@pytest.fixture(scope="module")
def judge(text, tmp_path_factory):
    """Return what says how a run is judged that is broken in the way of a name."""
    folder = tmp_path_factory.mktemp("broken")
    config = make_config(
        data=text, mesh={"cp": 2}, context={"ulysses_degree": 1, "load_balance": True}
    )
    run_ranks(run_reference, 1, config, numerics("float64", config), folder / "reference")

    def run(name: str) -> Any:
        run_ranks(run_broken, 2, name, config, folder / name)
        return compare(folder / "reference", folder / name)

    return run


@pytest.mark.ranks
@pytest.mark.long
def test_align_judges_documents_and_catches_attention_that_crosses_them(judge):
    report = judge("nothing")
    assert report.verdict == "aligned", report.why
    for name in ("attention_crosses_documents", "documents_of_another_row"):
        report = judge(name)
        assert report.verdict == "misaligned", name
        off = {row.name for row in report.tensors if row.kind == "grad" and not row.ok}
        assert "layers.0.attention.wq.weight" in off, name
