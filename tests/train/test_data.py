from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import Tensor

from paralign.config.run import RunConfig
from paralign.errors import ConfigError, DataError
from paralign.train.data import open_held_out, open_source, prepare_data
from tests.data.texts import TEXT, write_documents, write_tokenizer
from tests.train.runs import newest, run, tensors_in, training_config, worst

LENGTHS = (70, 9, 300, 33, 128, 64, 5, 41, 200, 17, 90, 2)


def packed(tmp_path, folder: str = "run", **sections) -> RunConfig:
    """Return a run on packed documents."""
    if not (tmp_path / "text").exists():
        write_documents(tmp_path / "text", *LENGTHS)
    data = {
        "source": str(tmp_path / "text"),
        "packing": "packed",
        "token_dir": str(tmp_path / "tokens"),
        "padding": 0.0,
    }
    merged = {**sections, "data": data | sections.get("data", {})}
    return training_config(tmp_path / folder, **merged)


def served(config: RunConfig, steps: range) -> list[dict[str, Tensor]]:
    source = open_source(config.for_training())
    return [source.global_batch(step) for step in steps]


def test_batches_are_the_same_whatever_the_mesh(tmp_path):
    meshes: tuple[dict[str, int], ...] = ({}, {"dp_shard": 4}, {"pp": 2, "cp": 2})
    found = [served(packed(tmp_path, mesh=mesh), range(12)) for mesh in meshes]
    for batches in itertools.zip_longest(*found):
        for name in ("tokens", "labels"):
            assert all(torch.equal(batches[0][name], other[name]) for other in batches[1:])


def test_an_epoch_has_every_row_once_and_what_is_held_out_in_none(tmp_path):
    validation = {"every": 1, "share": 0.25}
    config = packed(tmp_path, validation=validation, batch={"global_batch": 4})
    source, held_out = open_source(config), open_held_out(config)
    assert held_out is not None
    rows = [
        tuple(row)
        for step in range(source.num_rows // 4)
        for row in source.global_batch(step)["tokens"].tolist()
    ]
    kept = [
        tuple(row)
        for number in range(held_out.num_batches)
        for row in held_out.global_batch(number)["tokens"].tolist()
    ]
    assert len(set(rows)) == len(rows) == source.num_rows // 4 * 4
    assert not set(rows) & set(kept)
    whole = open_source(packed(tmp_path, batch={"global_batch": 4}))
    assert source.num_rows + 15 == whole.num_rows == 60


def test_a_held_out_source_is_read_instead(tmp_path):
    write_documents(tmp_path / "other", 130)
    validation = {"every": 1, "source": str(tmp_path / "other"), "batches": 1}
    config = packed(tmp_path, validation=validation, batch={"global_batch": 4})
    held_out = open_held_out(config)
    assert held_out is not None and held_out.num_batches == 1
    assert held_out.global_batch(0)["tokens"][0, :4].tolist() == [0, 1, 2, 3]
    assert open_source(config).num_rows == 60
    assert open_held_out(packed(tmp_path)) is None


def test_tokens_of_a_json_file_train(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "t.json", 280)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text(TEXT * 5)
    data = {"tokenizer": str(tokenizer), "end_token": "</s>"}
    config = packed(tmp_path, data=data, model={"vocab_size": 280})
    prepare_data(config)
    [path] = [p for p in (tmp_path / "tokens").iterdir() if p.is_dir()]
    [end], _ = run(config)
    assert end.is_complete and end.loss is not None and end.loss < 6
    content = path / "tokens.bin"
    content.write_bytes(content.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"tokens\.bin has changed"):
        prepare_data(config)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "cp": 2}], ids=str)
def test_going_on_in_the_middle_of_an_epoch_reads_the_rows_that_are_left(tmp_path, mesh):
    # 60 rows: the third step ends the first half of an epoch, the eighth is in the next one.
    common = {"train": {"steps": 9}}
    alone = packed(tmp_path, "alone", **common)
    run(alone)
    part = packed(tmp_path, "parts", mesh={"dp_shard": 4}, train={"steps": 3})
    run(part)
    assert newest(part).state()["rows_served"] == 24
    rest = packed(tmp_path, "parts", mesh=mesh, **common)
    run(rest)
    assert newest(rest).state()["rows_served"] == 72
    assert worst(tensors_in(newest(rest)), tensors_in(newest(alone))) <= 1e-12
    assert newest(rest).state()["num_tokens"] == newest(alone).state()["num_tokens"]


@pytest.mark.ranks
def test_going_on_with_other_data_is_refused(tmp_path):
    run(packed(tmp_path, train={"steps": 2}))
    with pytest.raises(ConfigError, match="other rows of them are held out"):
        run(packed(tmp_path, train={"steps": 3}, validation={"every": 1}))
    (tmp_path / "text" / "000").write_bytes(bytes(70))
    with pytest.raises(ConfigError, match=r"the files of data\.source=.* have changed"):
        run(packed(tmp_path, train={"steps": 3}))


@pytest.mark.ranks
def test_an_older_checkpoint_goes_on_and_token_files_may_move(tmp_path):
    plain = training_config(tmp_path / "old", train={"steps": 2})
    run(plain)
    state = newest(plain).path / "state.json"
    saved = json.loads(state.read_text())
    for key in ("packing", "end_token", "token_dir"):
        del saved["config"]["data"][key]
    del saved["rows_served"], saved["config"]["validation"]
    state.write_text(json.dumps(saved))
    [end], _ = run(training_config(tmp_path / "old", train={"steps": 3}))
    assert end.step == 3
    run(packed(tmp_path, train={"steps": 2}))
    moved = packed(tmp_path, train={"steps": 3}, data={"token_dir": str(tmp_path / "moved")})
    [end], _ = run(moved)
    assert end.step == 3
