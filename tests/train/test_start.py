from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import paralign as pa
from paralign.config.run import ModelSection, RunConfig
from paralign.errors import ConfigError, TrainingError
from paralign.models.registry import MODELS
from paralign.train.build import build_data, build_pieces
from paralign.train.metrics import read_metrics
from paralign.train.published import export_checkpoint, import_published
from paralign.train.start import start_whole
from tests.train.runs import newest, run, tensors_in, training_config, worst
from tests.weights.published import build, deepseek, logits, mixtral, tensors_of, write

SETTINGS = {"steps": 2, "log_every": 1}


def config_of(folder: Path, family: tuple[str, Any], source: Path, **mesh: int) -> RunConfig:
    name, config = family
    model = ModelSection.model_validate(
        {"name": name, **vars(config), "start_from": str(source)}
    ).model_dump(exclude_none=True)
    return training_config(folder, model=model, mesh=mesh, train=SETTINGS)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        (mixtral(num_heads=6, vocab_size=256), {"dp_shard": 2, "ep": 2}),
        (deepseek(num_heads=2, vocab_size=256, tie_embeddings=True), {"pp": 2, "tp": 2}),
    ],
    ids=["mixtral-dp2-ep2", "deepseek-pp2-tp2"],
)
def test_a_mesh_starts_from_a_published_model_as_one_rank_does(
    tmp_path: Path, family: tuple[str, Any], mesh: dict[str, int]
) -> None:
    published = write(tmp_path / "published", family, build(family))
    alone = config_of(tmp_path / "alone", family, published)
    _, said = run(alone)
    assert f"starting from {published}" in said
    spread = config_of(tmp_path / "spread", family, published, **mesh)
    run(spread)
    ours, theirs = tensors_in(newest(spread)), tensors_in(newest(alone))
    assert worst(ours, theirs) < 1e-12
    lines = [read_metrics(Path(one.train.dir)) for one in (spread, alone)]
    losses = [[line["loss_parts"]["cross_entropy"] for line in found] for found in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    # That the weights are those of the model which was published, the first loss shows.
    batch = build_data(alone.for_training()).global_batch(0)
    labels = batch["labels"].flatten()
    first = F.cross_entropy(logits(build(family), batch["tokens"]).flatten(0, 1), labels)
    assert losses[1][0] == pytest.approx(float(first), rel=1e-13)


@pytest.mark.ranks
def test_a_checkpoint_starts_another_run_and_only_its_weights_do(tmp_path: Path) -> None:
    first = training_config(tmp_path / "first", mesh={"tp": 2}, train={"steps": 2})
    run(first)
    changes = {"start_from": str(tmp_path / "first")}
    model = {**first.model.model_dump(exclude_none=True), **changes}
    still = {"lr": 1e-300, "weight_decay": 0.0}
    again = training_config(
        tmp_path / "again", model=model, mesh={"pp": 2}, train={"steps": 2}, optimizer=still
    )
    run(again)
    ours, theirs = tensors_in(newest(again)), tensors_in(newest(first))
    weights = [name for name in theirs if not name.startswith("optimizer.")]
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)
    assert any(name.startswith("optimizer.") for name in theirs)
    # A run that goes on does not need the folder it began from, nor read it.
    (tmp_path / "first").rename(tmp_path / "gone")
    longer = again.model_copy(update={"train": again.train.model_copy(update={"steps": 3})})
    _, said = run(longer)
    assert any(text.startswith("going on from") for text in said)


@pytest.mark.ranks
def test_a_damaged_checkpoint_is_no_start(tmp_path: Path) -> None:
    first = training_config(tmp_path / "first", train={"steps": 2})
    run(first)
    [file] = newest(first).path.glob("*model-00001*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    model = {**first.model.model_dump(exclude_none=True), "start_from": str(tmp_path / "first")}
    with pytest.raises(TrainingError, match="has changed since it was written"):
        run(training_config(tmp_path / "again", model=model, mesh={"dp_shard": 2}))


def test_a_whole_model_starts_as_its_parts_do(tmp_path: Path) -> None:
    family = deepseek()
    model = build(family)
    published = write(tmp_path / "published", family, model)
    section = {"name": family[0], **vars(family[1]), "start_from": str(published)}
    config = RunConfig(model=ModelSection.model_validate(section))
    whole, _ = build_pieces(config, torch.float64)
    whole = whole.to_empty(device="cpu")
    start_whole(whole, config)
    expected = tensors_of(model)
    assert all(torch.equal(t, expected[n]) for n, t in tensors_of(whole).items())


def test_weights_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    family = mixtral()
    model = build(family)
    tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    save_file({**tensors, "spare": torch.ones(2)}, tmp_path / "w.safetensors")
    config = RunConfig(model=ModelSection(start_from=str(tmp_path / "w.safetensors")))
    with pytest.raises(ConfigError, match="spare is in it and not in the model"):
        start_whole(model, config)


@pytest.mark.ranks
def test_weights_that_no_rank_has_a_place_for_are_refused(tmp_path: Path) -> None:
    model = training_config(tmp_path).model
    whole, _ = build_pieces(training_config(tmp_path), torch.float64)
    tensors = {name: torch.randn(p.shape) for name, p in whole.named_parameters()}
    save_file({**tensors, "spare": torch.ones(2)}, tmp_path / "w.safetensors")
    changed = {**model.model_dump(exclude_none=True), "start_from": str(tmp_path / "w.safetensors")}
    # Each of the two stages leaves the other one's weights alone; only one name is nobody's.
    with pytest.raises(ConfigError, match="in it and not in the model") as caught:
        run(training_config(tmp_path / "run", model=changed, mesh={"pp": 2}))
    assert str(caught.value).count(" is in it and not in the model") == 1
    assert "spare" in str(caught.value)


@pytest.mark.ranks
def test_what_was_imported_is_trained_and_exported_again(tmp_path: Path) -> None:
    family = deepseek(vocab_size=256, num_heads=2)
    model = build(family)
    published = write(tmp_path / "published", family, model)
    import_published(published, tmp_path / "seed")
    config = config_of(tmp_path / "run", family, tmp_path / "seed", dp_shard=2, ep=2)
    run(config)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(published / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert not any(torch.equal(ours[name], theirs[name]) for name in theirs)  # it was trained
    trained = MODELS[family[0]].build(family[1]).double()
    assert pa.load_initial(trained, tmp_path / "out") == []
    expected = tensors_in(newest(config))
    assert all(torch.equal(t, expected[n]) for n, t in tensors_of(trained).items())
