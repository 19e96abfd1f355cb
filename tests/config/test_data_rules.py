from __future__ import annotations

from typing import Any

import pytest

from paralign.config.rules import find_problems
from paralign.config.run import RunConfig
from tests.data.texts import write_tokenizer


def problems(**sections: Any) -> list[str]:
    sections.setdefault("model", {"name": "llama", "preset": "tiny"})
    return find_problems(RunConfig.model_validate(sections))


def test_a_tokenizer_must_fit_the_embedding(tmp_path):
    data = {"tokenizer": str(write_tokenizer(tmp_path / "t.json"))}
    small = {"name": "llama", "preset": "tiny", "vocab_size": 256}
    [problem] = problems(data=data, model=small)
    assert problem.startswith("model.vocab_size=256 is smaller than the 2")
    assert "Use vocab_size=2" in problem
    assert problems(data=data, model=small | {"vocab_size": 300}) == []


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path):
    [problem] = problems(data={"tokenizer": "byte"})
    assert problem.startswith("data.tokenizer='byte' cannot be read: no such file")
    [problem] = problems(data={"end_token": "</s>"})
    assert "data.end_token='</s>' has no effect on data.tokenizer=bytes" in problem


def test_rows_of_one_token_cannot_be_packed():
    batch = {"seq_len": 1, "global_batch": 8}
    model = {"name": "llama", "preset": "tiny"}
    found = problems(data={"packing": "packed"}, batch=batch, model=model, context={}, mesh={})
    problem = next(text for text in found if "packing" in text)
    assert "batch.seq_len=1 is too short for data.packing=packed" in problem


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        ({"share": 0.1}, "validation.share=0.1 has no effect without validation.every"),
        ({"source": "x", "batches": 2}, "validation.source=x and validation.batches=2 have no"),
        ({"every": 5, "share": 0.0}, "has nothing to validate on: validation.share=0"),
        ({"every": 5, "source": "/no"}, "validation.source='/no': there is no such file"),
        ({"every": 5, "source": "stdlib", "share": 0.1}, "no effect beside validation.source"),
    ],
)
def test_what_would_not_be_used_or_is_not_there_is_refused(validation, said):
    [problem] = problems(validation=validation)
    assert said in problem


def test_what_is_held_out_is_missing_for_training(tmp_path):
    (tmp_path / "text").write_bytes(bytes(8 * 64 + 1))
    data = {"source": str(tmp_path / "text")}
    assert problems(data=data) == []
    [problem] = problems(data=data, validation={"every": 5})
    assert "makes 8 rows of seq_len=64, of which validation.share=0.05 holds out 1: 7" in problem
