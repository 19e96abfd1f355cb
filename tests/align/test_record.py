from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as clip_imported_before

from paralign.align import compare, record, trace
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError, TraceError
from paralign.layout import boxes
from paralign.testing import run_on_ranks

EVERYTHING = ("loss", "norm", "params", "grads", "optimizer")


class Toy(nn.Module):
    """Embedding and head tied, a frozen bias, a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(dtype: torch.dtype = torch.float64) -> Toy:
    torch.manual_seed(0)
    return Toy().to(dtype)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randint(0, 11, (8, 6), generator=generator),
            torch.randint(0, 11, (8, 6), generator=generator),
        )


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, total: int) -> Tensor:
    logits = model(tokens)
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
    )


def train(
    model: nn.Module,
    steps: int,
    *,
    recorder: Any = None,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
    max_norm: float = 0.01,
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, labels, labels.numel())
        loss.backward()
        if recorder is not None:
            recorder.loss(loss, tokens=labels.numel(), reduction="mean", scope="global")
        clip(model.parameters(), max_norm)
        optimizer.step()
    return optimizer


def tensors(folder: Path) -> dict[tuple[str, int, str], Tensor]:
    """Return ``(kind, step, name) -> tensor`` of a trace of one rank, without None gradients."""
    found = {}
    with TraceReader(folder) as reader:
        (index,) = reader.ranks
        for entry in index.tensors:
            if entry.file is not None:
                (box,) = boxes(entry.map)
                name = f"{entry.name}.{entry.state}" if entry.state else entry.name
                found[entry.kind, entry.step, name] = reader.read(entry, box).clone()
    return found


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


def clip_in_two_calls(parameters: Any, max_norm: float) -> None:
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters, norm: torch.nn.utils.clip_grad_norm_(parameters, norm),
        lambda parameters, norm: torch.nn.utils.clip_grad.clip_grad_norm_(parameters, norm),
        clip_imported_before,
        clip_in_two_calls,
    ],
    ids=["attribute", "module", "imported before", "two calls"],
)
def test_gradients_are_taken_before_clipping(tmp_path: Path, clip: Callable[..., Any]) -> None:
    model = build()
    tokens, labels = next(batches(1))
    loss_of(model, tokens, labels, labels.numel()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert norm > 0.01, "clipping would do nothing"
    model = build()
    with record(tmp_path / "t", model):
        train(model, 1, clip=clip)
    found = tensors(tmp_path / "t")
    assert {name for kind, _, name in found if kind == Kind.GRAD} == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[Kind.GRAD, 0, name], gradient)
    with TraceReader(tmp_path / "t") as reader:
        (value,) = [e.value for e in reader.ranks[0].scalars if e.kind == "norm"]
    assert value == pytest.approx(float(norm), rel=1e-12)


def test_gradients_hidden_in_a_call_are_taken_on_demand(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model, what=("grads", "norm")) as rec:

        def engine(parameters: Any, max_norm: float) -> None:
            rec.gradients()
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1e-3)
            rec.norm(7.0)

        train(model, 1, clip=engine)
    gradient = tensors(tmp_path / "t")[Kind.GRAD, 0, "norm.weight"]
    assert model.norm.weight.grad is not None
    torch.testing.assert_close(gradient, model.norm.weight.grad * 1e3)


def test_a_reported_norm_counts_instead_of_a_seen_one(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model) as rec:

        def clip(parameters: Any, max_norm: float) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            rec.norm(torch.tensor(3.0))

        train(model, 1, clip=clip)
    with TraceReader(tmp_path / "t") as reader:
        assert [e.value for e in reader.ranks[0].scalars if e.kind == "norm"] == [3.0]


def test_everything_is_put_back(tmp_path: Path) -> None:
    names = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
    before = [getattr(torch.nn.utils, name) for name in names]
    inside = dict(vars(torch.nn.utils.clip_grad))
    model = build()
    with record(tmp_path / "t", model, steps=1):
        assert torch.nn.utils.clip_grad_norm_ is not before[0]
        train(model, 3)
        # One step is recorded; then the recorder detaches by itself.
        assert torch.nn.utils.clip_grad_norm_ is before[0]
        with TraceReader(tmp_path / "t") as reader:
            assert reader.facts.steps == [0]
    assert [getattr(torch.nn.utils, name) for name in names] == before
    assert dict(vars(torch.nn.utils.clip_grad)) == inside


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


def test_other_models_and_optimizers_are_not_ours(tmp_path: Path) -> None:
    model, other = build(), build()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    with record(tmp_path / "t", model, steps=1):
        for tokens, labels in batches(2):
            loss_of(other, tokens, labels, 1).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            theirs.step()
        train(model, 1)
    with TraceReader(tmp_path / "t") as reader:
        gradients = [e for e in reader.ranks[0].tensors if e.kind == Kind.GRAD and e.file]
        assert len(gradients) == 6


def test_several_optimizers_end_a_step_together(tmp_path: Path) -> None:
    model = build()
    model.unused.requires_grad_(False)
    first = torch.optim.SGD([model.embed.weight], lr=0.1)
    rest = [p for n, p in model.named_parameters() if p.requires_grad and n != "embed.weight"]
    second = torch.optim.Adam(rest, lr=0.1)
    for given, folder in ((None, "found"), ([first, second], "given")):
        with record(tmp_path / folder, model, optimizer=given, steps=2, what=EVERYTHING):
            for tokens, labels in batches(2):
                loss_of(model, tokens, labels, labels.numel()).backward()
                for optimizer in (first, second):
                    group = optimizer.param_groups[0]["params"]
                    torch.nn.utils.clip_grad_norm_(group, 1e-3)
                    optimizer.step()
                model.zero_grad()
        with TraceReader(tmp_path / folder) as reader:
            assert reader.facts.steps == [0, 1]
            assert [o["class"] for o in reader.ranks[0].optimizers] == ["SGD", "Adam"]
        found = tensors(tmp_path / folder)
        # Taken at the first clipping: the second group's are not clipped yet either.
        assert found[Kind.GRAD, 1, "norm.weight"].norm() > 2e-3
        assert torch.equal(found[Kind.PARAM_AFTER, 1, "norm.weight"], model.norm.weight)


def test_a_trainable_parameter_without_optimizer_only_delays_the_end_of_a_step(
    tmp_path: Path,
) -> None:
    model = build()
    optimizer = torch.optim.SGD([model.embed.weight], lr=0.1)
    kept = []
    with record(tmp_path / "t", model, steps=2, what=("grads", "params")):
        for tokens, labels in batches(2):
            optimizer.zero_grad()
            loss_of(model, tokens, labels, labels.numel()).backward()
            assert model.embed.weight.grad is not None
            kept.append(model.embed.weight.grad.clone())
            torch.nn.utils.clip_grad_norm_([model.embed.weight], 1e-3)
            optimizer.step()
            kept.append(model.embed.weight.detach().clone())
    found = tensors(tmp_path / "t")
    for step in (0, 1):
        assert torch.equal(found[Kind.GRAD, step, "embed.weight"], kept[2 * step])
        assert torch.equal(found[Kind.PARAM_AFTER, step, "embed.weight"], kept[2 * step + 1])


class Engine:
    """Something with ``step()`` that is no torch optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, factor: float) -> str:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(factor * parameter.grad)
        return "stepped"


def test_anything_with_step_is_an_optimizer(tmp_path: Path) -> None:
    model = build()
    engine = Engine(model)
    with record(tmp_path / "t", model, optimizer=engine):
        tokens, labels = next(batches(1))
        loss_of(model, tokens, labels, 1).backward()
        assert engine.step(0.5) == "stepped"
    assert "step" not in vars(engine)
    found = tensors(tmp_path / "t")
    name = "norm.weight"
    change = found[Kind.PARAM, 0, name] - found[Kind.PARAM_AFTER, 0, name]
    torch.testing.assert_close(change, 0.5 * found[Kind.GRAD, 0, name])


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
        ({"what": ("grads", "outputs")}, "what='outputs' is not one of loss, norm, params, grads"),
        ({"what": ()}, "what is empty"),
        ({"mesh": {"tp": (0, 2)}}, r"mesh\['tp'\]=\(0, 2\) is not a process group"),
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


# ---- real ranks ----


def train_sharded(folder: str, mesh_shape: dict[str, int], fault: str = "") -> int:
    """Train on rows split over all ranks, parameters over ``fsdp`` (dp and cp folded)."""
    world = dist.get_world_size()
    names = tuple(mesh_shape)
    mesh = init_device_mesh("cpu", tuple(mesh_shape.values()), mesh_dim_names=names)
    flat = mesh if len(names) == 1 else mesh[names]._flatten("fsdp")
    model = build()
    # Tied and frozen parameters go into one unit with the rest; the layers have their own.
    fully_shard(model.layers[1], mesh=flat)
    fully_shard(model, mesh=flat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    with record(folder, model, mesh=mesh, optimizer=optimizer, steps=2, what=EVERYTHING) as rec:
        for tokens, labels in batches(2):
            optimizer.zero_grad()
            local = loss_of(model, tokens[rank::world], labels[rank::world], labels.numel())
            (local * world).backward()  # FSDP averages
            if fault == "rank" and rank == 1:
                model.norm.weight.grad.to_local().mul_(1.5)  # type: ignore[union-attr]
            if fault == "factor":
                model.layers[0].weight.grad.mul_(0.25)  # type: ignore[union-attr, operator]
            rec.loss(local * labels.numel(), tokens=labels[rank::world].numel())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return rank


def train_alone(folder: Path) -> None:
    model = build()
    with record(folder, model, steps=2, what=EVERYTHING) as rec:
        train(model, 2, recorder=rec, max_norm=0.1)


@pytest.mark.ranks
def test_shardings_and_one_device_agree(tmp_path: Path) -> None:
    train_alone(tmp_path / "one")
    run_on_ranks(train_sharded, 4, str(tmp_path / "fsdp4"), {"fsdp": 4})
    run_on_ranks(train_sharded, 4, str(tmp_path / "fsdp2cp2"), {"dp_shard": 2, "cp": 2})
    for reference, parallel in (
        ("one", "fsdp4"),
        ("one", "fsdp2cp2"),
        ("fsdp2cp2", "fsdp4"),
        ("fsdp4", "one"),
    ):
        report = compare(tmp_path / reference, tmp_path / parallel)
        assert report.verdict == "aligned", (reference, parallel, report.why)
        assert report.coverage.compared == report.coverage.parameters == 8
    with TraceReader(tmp_path / "fsdp2cp2") as reader:
        index = reader.ranks[3]
        assert index.coordinates == {"dp_shard": 1, "cp": 1, "fsdp": 3}
        assert index.axes == {"dp_shard": [1, 3], "cp": [2, 3], "fsdp": [0, 1, 2, 3]}
        entry = next(e for e in index.tensors if e.name == "embed.weight" and e.kind == Kind.GRAD)
        assert entry.map[0] == (((0, 2), (9, 11)),)
        assert entry.replicated_over == ()


@pytest.mark.ranks
def test_faults_on_real_ranks_are_found(tmp_path: Path) -> None:
    train_alone(tmp_path / "one")
    run_on_ranks(train_sharded, 4, str(tmp_path / "factor"), {"fsdp": 4}, "factor")
    report = compare(tmp_path / "one", tmp_path / "factor")
    (finding,) = report.findings
    assert (finding.cause, finding.axes) == ("constant_factor", ["fsdp"])
    assert (finding.evidence["factor"], finding.tensor) == ("1/4", "layers.0.weight")
    run_on_ranks(train_sharded, 4, str(tmp_path / "rank"), {"fsdp": 4}, "rank")
    report = compare(tmp_path / "one", tmp_path / "rank")
    (finding,) = report.findings
    assert (finding.cause, finding.evidence["ranks"]) == ("single_rank", [1])


def record_placements(folder: str) -> dict[str, Any]:
    """Record DTensors over (dp, tp) next to a plain tensor, and say what each rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))

    def place(name: str, module: nn.Module, on: Any) -> None:
        if name == "0":
            for key, parameter in list(module.named_parameters()):
                shard = distribute_tensor(parameter.data, on, [Replicate(), Shard(0)])
                module.register_parameter(key, nn.Parameter(shard))
        if name == "1":
            shard = distribute_tensor(module.weight.data, on, [Shard(0), Shard(1)])  # type: ignore[arg-type]
            module.register_parameter("weight", nn.Parameter(shard))

    distribute_module(model[:2], mesh, place)
    with record(folder, model, mesh=mesh, what=("params",)) as rec:
        pass
    del rec
    return {
        name: p.full_tensor().tolist() if hasattr(p, "full_tensor") else p.tolist()
        for name, p in model.named_parameters()
    }


@pytest.mark.ranks
def test_pieces_are_where_full_tensor_puts_them(tmp_path: Path) -> None:
    (expected, *_) = run_on_ranks(record_placements, 4, str(tmp_path / "t"))
    with TraceReader(tmp_path / "t") as reader:
        seen: dict[str, Tensor] = {}
        for index in reader.ranks:
            for entry in index.tensors:
                full = seen.setdefault(entry.name, torch.full(entry.shape, torch.nan))
                for box in boxes(entry.map):
                    region = zip(box.start, box.shape, strict=True)
                    full[tuple(slice(at, at + n) for at, n in region)] = reader.read(entry, box)
        replicated = {entry.name: entry.replicated_over for entry in reader.ranks[0].tensors}
    for name, values in expected.items():
        assert seen[name].tolist() == values
    assert replicated == {
        "0.weight": ("dp",),
        "0.bias": ("dp",),
        "1.weight": (),
        "2.weight": ("dp", "tp"),
        "2.bias": ("dp", "tp"),
    }


def refuse_together(folder: str) -> str:
    try:
        record(folder, nn.Linear(2, 2)).start()
    except TraceError as error:
        return str(error)
    return "started"


@pytest.mark.ranks
def test_no_rank_waits_for_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    messages = run_on_ranks(refuse_together, 2, str(tmp_path))
    assert "holds 'precious.txt', which is no part of a trace" in messages[0]
    assert messages[1].endswith("rank 0 could not prepare the folder.")


def record_alone_in_a_world(folder: str) -> bool:
    if dist.get_rank() == 0:
        train_in_world = build()
        with record(folder, train_in_world, alone=True):
            train(train_in_world, 1)
    dist.barrier()
    return True


@pytest.mark.ranks
def test_one_rank_can_record_a_run_of_its_own(tmp_path: Path) -> None:
    run_on_ranks(record_alone_in_a_world, 2, str(tmp_path / "t"))
    with TraceReader(tmp_path / "t") as reader:
        assert reader.world_size == 1
