from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

from paralign.align import compare, record, trace
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError, TraceError
from tests.align.toys import EVERYTHING, batches, build, loss_of, tensors, train


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    plain = build(torch.float32)
    state = train(plain, 3).state_dict()
    watched = build(torch.float32)
    before = torch.random.get_rng_state()
    with record(tmp_path / "t", watched, steps=3, what=EVERYTHING) as rec:
        recorded_state = train(watched, 3, recorder=rec).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    for ours, theirs in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert state["state"].keys() == recorded_state["state"].keys()
    for index, states in state["state"].items():
        for name, value in states.items():
            assert torch.equal(value, recorded_state["state"][index][name])


def test_everything_of_a_step_is_recorded(tmp_path: Path) -> None:
    model = build()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with record(tmp_path / "t", model, steps=2, what=EVERYTHING) as rec:
        optimizer = train(model, 2, recorder=rec)
    found = tensors(tmp_path / "t")
    for name, parameter in model.named_parameters():
        assert torch.equal(found[Kind.PARAM, 0, name], start[name])
        assert torch.equal(found[Kind.PARAM_AFTER, 1, name], parameter)
        for state, value in optimizer.state[parameter].items():
            assert torch.equal(found[Kind.MOMENT, 1, f"{name}.{state}"], value)
    assert (Kind.MOMENT, 1, "embed.weight.exp_avg_sq") in found
    with TraceReader(tmp_path / "t") as reader:
        index = reader.ranks[0]
        assert reader.facts.steps == index.steps == [0, 1]
        assert [entry.kind for entry in index.scalars] == ["loss", "norm"] * 2
        by_name = {e.name: e for e in index.tensors if (e.kind, e.step) == (Kind.GRAD, 0)}
        assert by_name["embed.weight"].aliases == ("head.weight",)
        assert "head.weight" not in by_name
        assert by_name["unused"].file is None
        assert by_name["layers.0.bias"].trainable is False
        assert by_name["layers.0.bias"].file is None
        (optimizer_facts,) = index.optimizers
        assert optimizer_facts["class"] == "AdamW"
        assert optimizer_facts["groups"][0]["options"]["lr"] == 1e-2
        assert "foreach" not in optimizer_facts["groups"][0]["options"]
        assert index.modules["norm.weight"]["class"] == "LayerNorm"
    schema = Path(trace.__file__).parent / "schema" / "trace.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    for path in (tmp_path / "t").glob("*.json"):
        validator.validate(json.loads(path.read_text()))


def test_later_steps(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model, start=1, steps=1, what=EVERYTHING) as rec:
        train(model, 4, recorder=rec)
    found = tensors(tmp_path / "t")
    assert {step for _, step, _ in found} == {1}
    other = build()
    train(other, 1)
    assert torch.equal(found[Kind.PARAM, 1, "norm.weight"], other.norm.weight)
    with TraceReader(tmp_path / "t") as reader:
        assert [e.step for e in reader.ranks[0].scalars] == [1, 1]


def test_a_run_that_ends_early_says_which_steps_it_has(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model, steps=5):
        train(model, 2)
    with TraceReader(tmp_path / "t") as reader:
        assert reader.facts.steps == [0, 1]


def test_a_run_that_fails_leaves_no_complete_trace(tmp_path: Path) -> None:
    model, before = build(), torch.nn.utils.clip_grad_norm_
    with pytest.raises(ZeroDivisionError), record(tmp_path / "t", model):
        train(model, 0)
        _ = 1 // 0
    assert torch.nn.utils.clip_grad_norm_ is before
    with pytest.raises(TraceError, match=r"facts.json: missing, so rank 0 did not finish"):
        TraceReader(tmp_path / "t")


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

    class Compiled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self._orig_mod(x)
            return result

    model = build()
    names = [n for n, _ in model.named_parameters()]
    model.layers[1] = Compiled(model.layers[1])
    with record(tmp_path / "t", Wrapper(Compiled(model)), what=("params",)):
        train(model, 1)
    with TraceReader(tmp_path / "t") as reader:
        found = [e.name for e in reader.ranks[0].tensors if e.kind == Kind.PARAM]
    assert sorted(found) == sorted(names)


def test_stage_modules_keep_their_names_and_tied_copies_share_one(tmp_path: Path) -> None:
    class Stage(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(3, 3, bias=False))

    first, last = Stage("embed"), Stage("head")
    last.load_state_dict({"head.weight": first.state_dict()["embed.weight"]})
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=1.0)
    with record(
        tmp_path / "t",
        [first, last],
        names={"head.weight": "embed.weight"},
        what=("params", "grads"),
    ):
        for module in (first, last):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
    with TraceReader(tmp_path / "t") as reader:
        entries = [e for e in reader.ranks[0].tensors if e.kind == Kind.GRAD]
    assert [(e.name, e.source) for e in entries] == [
        ("embed.weight", None),
        ("embed.weight", "head.weight"),
    ]
    report = compare(tmp_path / "t", tmp_path / "t")
    assert (report.verdict, report.coverage.compared) == ("aligned", 1)


def test_names_that_cannot_be_recorded(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError) as caught:
        record(tmp_path / "t", [a, b], names={"gone": "x"})
    assert str(caught.value).splitlines() == [
        "cannot name the parameters to record:",
        "  - two different parameters are both called 'weight'. Pipeline chunks must keep global "
        "names; record each chunk with the names of the whole model",
        "  - names renames 'gone', which is no parameter",
    ]
    with pytest.raises(ConfigError, match="the model has no parameters"):
        record(tmp_path / "t", nn.Identity())
    b.weight = a.weight
    record(tmp_path / "t", [a, b], names=lambda name: f"layers.3.{name}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"start": -1}, "start=-1 must be at least 0"),
        ({"what": ("grads", "all")}, "what='all' is not one of loss, norm, params, grads"),
        ({"what": ()}, "what is empty"),
        ({"mesh": {"tp": (0, 2)}}, "but this process belongs to no process group"),
        ({"mesh": {"tp": (2, 2)}}, r"mesh\['tp'\]=\(2, 2\) must be \(index, size\)"),
        ({"mesh": {"tp": 2}}, r"mesh\['tp'\]=2 is neither a process group nor \(index, size\)"),
        ({"source": "megatron2"}, "source='megatron2' is not one of auto, torch, megatron"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(tmp_path / "t", build(), **arguments)


def test_wrong_losses_and_calls_out_of_order(tmp_path: Path) -> None:
    recorder = record(tmp_path / "t", build())
    with pytest.raises(TraceError, match="recording has not begun"):
        recorder.stop()
    recorder.start()
    with pytest.raises(TraceError, match="was started before"):
        recorder.start()
    with pytest.raises(ConfigError, match="a local mean cannot be added up without its weight"):
        recorder.loss(1.0, reduction="mean")
    with pytest.raises(ConfigError, match="reduction='avg' must be 'sum' or 'mean'"):
        recorder.loss(1.0, reduction="avg")
    with pytest.raises(ConfigError, match="scope='all' must be 'local' or 'global'"):
        recorder.loss(1.0, scope="all")
    recorder.stop()
    recorder.stop()


def test_losses_of_parts_are_added_up_by_their_tokens(tmp_path: Path) -> None:
    reports: dict[str, list[dict[str, Any]]] = {
        "sums": [{"value": 6.0, "tokens": 3}, {"value": 4.0, "tokens": 2}],
        "means": [
            {"value": 2.0, "tokens": 3, "reduction": "mean"},
            {"value": torch.tensor(2.0), "tokens": torch.tensor(2), "reduction": "mean"},
        ],
        "whole": [{"value": 2.0, "tokens": 5, "reduction": "mean", "scope": "global"}],
        "whole sum": [{"value": 10.0, "tokens": 5, "scope": "global"}],
        "mean of means": [{"value": 2.1, "tokens": 5, "reduction": "mean", "scope": "global"}],
        "bare sum": [{"value": 10.0}],
    }
    for name, calls in reports.items():
        model = build()
        with record(tmp_path / name, model, what=("loss", "grads")) as rec:
            for call in calls:
                rec.loss(**call)
            train(model, 1)
    verdicts = {name: compare(tmp_path / "whole", tmp_path / name) for name in reports}
    aligned = ["sums", "means", "whole", "whole sum"]
    assert [name for name, report in verdicts.items() if report.verdict == "aligned"] == aligned
    assert verdicts["mean of means"].verdict == "misaligned"
    assert "reports a sum without its tokens" in verdicts["bare sum"].why


def test_a_loss_nobody_reported_is_not_aligned(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model):
        train(model, 1)
    report = compare(tmp_path / "t", tmp_path / "t")
    assert report.verdict == "inconclusive"
    assert "loss: step 0: not reported. Call rec.loss(...)" in report.why


def test_optimizer_state_of_unknown_layout_is_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.Adafactor(model.parameters())
    with record(tmp_path / "t", model, what=("optimizer",)):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    report = compare(tmp_path / "t", tmp_path / "t", allow_skipped=True)
    assert {item["name"] for item in report.coverage.skipped} == {
        "weight.row_var",
        "weight.col_var",
    }
    assert "is not the parameter's" in report.coverage.skipped[0]["why"]


def test_disk_need_is_known_beforehand(tmp_path: Path) -> None:
    model = build()
    rec = record(tmp_path / "t", model, steps=2)
    with rec:
        train(model, 2)
    size = sum(path.stat().st_size for path in (tmp_path / "t").glob("*.safetensors"))
    assert size == pytest.approx(rec.disk_bytes, rel=0.5)


def test_low_precision_runs_pass_by_the_truth(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        start = build(dtype).state_dict()
        for name, kind, order in (
            ("ref", dtype, 1),
            ("par", dtype, 4),
            ("truth", torch.float64, 1),
        ):
            model = build(kind)
            model.load_state_dict(start)
            with record(tmp_path / name, model, steps=2, what=EVERYTHING) as rec:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                for tokens, labels in batches(2):
                    optimizer.zero_grad()
                    total = 0.0
                    for part in range(order):
                        rows = slice(part, None, order)
                        loss = loss_of(model, tokens[rows], labels[rows], labels.numel())
                        loss.backward()
                        total += float(loss.detach())
                    rec.loss(total, tokens=labels.numel(), reduction="mean", scope="global")
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
        report = compare(tmp_path / "ref", tmp_path / "par", truth=tmp_path / "truth")
        assert report.verdict == "aligned", report.why
        assert report.yardstick == "truth"
