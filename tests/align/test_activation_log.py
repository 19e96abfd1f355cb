from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.align import compare, record
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError
from paralign.layout import boxes
from tests.align.judging import check_trace
from tests.align.nets import build, train

TOKENS = torch.arange(24).reshape(4, 6)


class Arguments(nn.Module):
    """Takes its inputs under names of its own."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24, 3))
        self.names = names

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        return self.weight[x]


class PositionIds(Arguments):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, labels: Tensor
    ) -> Tensor:
        return self.weight[input_ids]


def log(
    folder: Path,
    model: nn.Module,
    *args: Tensor,
    told: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, TensorEntry]:
    """Record one step and return what was noted of its inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder, model, optimizer=optimizer, what=("grads", "inputs")) as recorder:
        if told is not None:
            recorder.inputs(**told)
        model(*args, **kwargs).sum().backward()
        optimizer.step()
    with TraceReader(folder) as reader:
        return {entry.name: entry for entry in reader.ranks[0].tensors if entry.kind == Kind.INPUT}


def test_inputs_are_seen_under_the_names_that_models_give_them(tmp_path: Path) -> None:
    assert list(log(tmp_path, Arguments(), TOKENS)) == ["tokens"]
    given: dict[str, Any] = {"targets": TOKENS, "positions": torch.arange(6), "mask": TOKENS}
    found = log(tmp_path, Arguments(), TOKENS, **given)
    assert list(found) == ["labels", "positions", "tokens"]
    assert {entry.shape for entry in found.values()} == {(4, 6)}
    found = log(tmp_path, PositionIds(), TOKENS, TOKENS, torch.arange(6), TOKENS)
    assert list(found) == ["tokens", "positions", "labels"]


def test_what_the_loop_tells_counts_instead(tmp_path: Path) -> None:
    told = {"tokens": TOKENS[:, :3], "samples": [7, 8, 9, 4]}
    found = log(tmp_path, Arguments(), TOKENS, told=told)
    assert {name: entry.shape for name, entry in found.items()} == {"tokens": (4, 3)}
    with TraceReader(tmp_path) as reader:
        assert reader.ranks[0].token_maps[0].samples == (7, 8, 9, 4)
    check_trace(tmp_path)


def test_wrong_inputs_are_refused_all_at_once(tmp_path: Path) -> None:
    model = Arguments()
    recorder = record(tmp_path, model, what=("inputs",)).start()
    with pytest.raises(ConfigError) as caught:
        recorder.inputs(TOKENS, labels=TOKENS[:, 1:], positions=TOKENS.double(), samples=[1])
    text = str(caught.value)
    assert "labels has shape (4, 5), but tokens (4, 6)" in text
    assert "positions has dtype=torch.float64. Pass whole numbers" in text
    assert "samples names 1 rows, but tokens has 4" in text
    with pytest.raises(ConfigError, match=r"tokens has shape \(6,\), not \[rows, positions\]"):
        recorder.inputs(TOKENS[0])
    recorder.stop()


def test_large_outputs_are_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "one", build())
    monkeypatch.setattr("paralign.align.payload_stream.FILE_BYTES", 4096)
    train(tmp_path / "many", build())
    files = sorted(path.name for path in (tmp_path / "many").glob("*activations*"))
    assert len(files) > 3
    assert files[0] == "rank00000.step0.activations0.safetensors"
    check_trace(tmp_path / "many")
    report = compare(tmp_path / "one", tmp_path / "many")
    assert report.verdict == "aligned", report.why
    assert len([row for row in report.tensors if row.kind == Kind.OUTPUT_GRAD]) == 11


class Handing(nn.Module):
    """Returns what its part did, then changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 11)
        self.part = nn.Sequential(nn.Linear(11, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.part(self.embed(tokens))
        doubled: Tensor = x.mul_(2.0)
        return doubled


def test_a_tensor_that_is_handed_on_is_stored_once_and_before_it_is_changed(tmp_path: Path) -> None:
    model = Handing().double()
    seen: list[Tensor] = []
    model.part[0].register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    train(tmp_path, model, micro_batches=1)
    with TraceReader(tmp_path) as reader:
        entries = {e.name: e for e in reader.ranks[0].tensors if e.kind == Kind.OUTPUT}
        assert entries["part"].key == entries["part.0"].key != entries["embed"].key
        assert entries["part"].file is not None
        found = reader._payload(entries["part"].file)
        assert found.describe(str(entries["part"].key))[1] == (8, 6, 11)
        assert len(entries) == 3
    report = compare(tmp_path, tmp_path)
    assert report.verdict == "aligned"
    assert torch.equal(seen[0], output(tmp_path, entries["part"]))


def output(folder: Path, entry: TensorEntry) -> Tensor:
    with TraceReader(folder) as reader:
        return reader.read(entry, boxes(entry.map)[0])


class Routed(nn.Module):
    """Sends some tokens, in an order of its own, through an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 11)
        self.expert = nn.Linear(11, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        chosen = tokens > 6
        whole: Tensor = x.masked_scatter(chosen[..., None], self.expert(x[chosen]))
        return whole


def test_what_a_router_has_chosen_is_counted_only(tmp_path: Path) -> None:
    for folder in ("ref", "par"):
        torch.manual_seed(1)
        train(tmp_path / folder, Routed().double())
    with TraceReader(tmp_path / "ref") as reader:
        found = [e for e in reader.ranks[0].tensors if (e.kind, e.name) == (Kind.OUTPUT, "expert")]
    assert found
    assert all(entry.file is None and entry.shape[1:] == (11,) for entry in found)
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert report.verdict == "aligned", report.why
    assert any("first expert: its rows are chosen by a router" in note for note in report.notes)
