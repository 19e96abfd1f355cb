from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paralign.align import compare, record
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError
from paralign.layout import boxes
from paralign.testing import run_on_ranks
from tests.align.toys import EVERYTHING, Toy, batches, build, loss_of

WHAT = (*EVERYTHING, "microbatch_grads")
CPU = torch.device("cpu")


def toy() -> Toy:
    """The toy without what flat parameters cannot hold: frozen and unused parameters."""
    model = build()
    del model.unused
    model.layers[0].bias.requires_grad_(True)
    return model


class Uncalled(Toy):
    """Computes with the norm's weights without calling the norm, as a router may with its gate."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        norm = self.norm
        x = nn.functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        logits: Tensor = self.head(x)
        return logits


def parts(world: int, rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of this rank's rows of a step."""
    tokens, labels = list(batches(2))[step]
    return list(zip(tokens[rank::world].chunk(2), labels[rank::world].chunk(2), strict=True))


def train(folder: Path | str, model: nn.Module, mesh: Any, sync: Any = None) -> None:
    """Train two steps of two micro-batches; ``sync(last)`` surrounds each one."""
    in_world = mesh is not None
    world, rank = (dist.get_world_size(), dist.get_rank()) if in_world else (1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(folder, model, mesh=mesh, steps=2, what=WHAT) as rec:
        for step in range(2):
            optimizer.zero_grad()
            for number, (tokens, labels) in enumerate(parts(world, rank, step)):
                with sync(number == 1) if sync else contextlib.nullcontext():
                    loss = loss_of(model, tokens, labels, labels.numel() * 2 * world)
                    (loss * world).backward()  # data parallelism averages
                rec.loss(loss.detach() * labels.numel() * 2 * world, tokens=labels.numel())
            optimizer.step()


def train_on_ranks(folder: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model: Any = toy()
    if kind == "fsdp2 uncalled":
        model.__class__ = Uncalled
    sync: Any = None
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
        if kind != "ddp":
            sync = lambda last: (  # noqa: E731
                contextlib.nullcontext() if last and kind == "ddp no_sync" else model.no_sync()
            )
    elif kind.startswith("fsdp2"):
        fully_shard(model.layers[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if kind == "fsdp2 no_sync":

            def sync(last: bool) -> Any:
                model.set_requires_gradient_sync(last)
                return contextlib.nullcontext()
    else:
        originals = kind == "fsdp1 originals"
        model.layers[1] = FullyShardedDataParallel(
            model.layers[1], use_orig_params=originals, device_id=CPU
        )
        model = FullyShardedDataParallel(model, use_orig_params=originals, device_id=CPU)
    train(folder, model, mesh, sync)


def summed(folder: Path, step: int) -> dict[str, Tensor]:
    """Add up all micro-batches of all ranks, divided by the ranks as data parallelism does."""
    found: dict[str, Tensor] = {}
    with TraceReader(folder) as reader:
        for index in reader.ranks:
            for entry in index.tensors:
                if (entry.kind, entry.step) != (Kind.MICRO_GRAD, step):
                    continue
                total = found.setdefault(entry.name, torch.zeros(entry.shape, dtype=torch.float64))
                for box in boxes(entry.map):
                    region = zip(box.start, box.shape, strict=True)
                    part = reader.read(entry, box) / reader.world_size
                    total[tuple(slice(at, at + n) for at, n in region)] += part
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("micro") / "one"
    train(folder, toy(), None)
    return folder


KINDS = [
    "ddp",
    "ddp no_sync",
    "fsdp2",
    "fsdp2 no_sync",
    "fsdp2 uncalled",
    "fsdp1 originals",
    "fsdp1 flat",
]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_recorded_like_one_device(tmp_path: Path, one: Path, kind: str) -> None:
    run_on_ranks(train_on_ranks, 2, str(tmp_path / "t"), kind)
    report = compare(one, tmp_path / "t", allow_skipped=True)
    assert report.verdict == "aligned", report.why
    assert report.coverage.compared == report.coverage.parameters == 7
    for step in range(2):
        micro, reference = summed(tmp_path / "t", step), summed(one, step)
        assert micro.keys() == reference.keys()
        for name, gradient in reference.items():
            torch.testing.assert_close(micro[name], gradient, rtol=1e-12, atol=1e-15)
    with TraceReader(tmp_path / "t") as reader:
        for index in reader.ranks:
            assert index.not_recorded == []
            found = [e for e in index.tensors if e.kind == Kind.MICRO_GRAD]
            assert {e.micro_batch for e in found} == {0, 1}
            assert {e.partial_over for e in found} == {("dp",)}


@pytest.mark.ranks
def test_a_missing_reduction_is_in_the_gradients_not_in_the_parts(
    tmp_path: Path, one: Path
) -> None:
    run_on_ranks(train_on_ranks, 2, str(tmp_path / "t"), "ddp never")
    report = compare(one, tmp_path / "t", allow_skipped=True)
    assert report.verdict == "misaligned"
    for name, gradient in summed(one, 0).items():
        torch.testing.assert_close(summed(tmp_path / "t", 0)[name], gradient)


class Checkpointed(nn.Module):
    """Two segments that share a parameter, each repeated in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 3, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_repeated_forwards_count_once(tmp_path: Path, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    what = ("grads", "microbatch_grads")
    with record(tmp_path / "t", model, what=what):
        for number in range(3):
            x = torch.full((2, 3), 1.0 + number, dtype=torch.float64, requires_grad=True)
            model(x).sum().backward()
        optimizer.step()
    with TraceReader(tmp_path / "t") as reader:
        (index,) = reader.ranks
        found = [e for e in index.tensors if (e.kind, e.name) == ("micro_grad", "shared.weight")]
        (grad,) = [e for e in index.tensors if (e.kind, e.name) == ("grad", "shared.weight")]
        assert [e.micro_batch for e in found] == [0, 1, 2]
        (box,) = boxes(grad.map)
        total = torch.stack([reader.read(e, box) for e in found]).sum(0)
        torch.testing.assert_close(total, reader.read(grad, box))


class Viewed(nn.Module):
    """Lets its gate compute with a view of the gate's weight, as tensor parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate.weight
        vars(self.gate)["_parameters"]["weight"] = weight.view(2, 3)
        try:
            out: Tensor = self.gate(x)
        finally:
            vars(self.gate)["_parameters"]["weight"] = weight
        return out


def test_a_view_of_a_watched_leaf_counts_once(tmp_path: Path) -> None:
    model, x = Viewed(), torch.ones(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with record(tmp_path / "t", nn.Sequential(model), what=("grads", "microbatch_grads")):
        model(x).sum().backward()
        optimizer.step()
    with TraceReader(tmp_path / "t") as reader:
        (index,) = reader.ranks
        (entry,) = [
            e for e in index.tensors if (e.kind, e.name[-11:]) == ("micro_grad", "gate.weight")
        ]
        (box,) = boxes(entry.map)
        assert torch.equal(reader.read(entry, box), torch.full((2, 3), 4.0, dtype=torch.float64))


def test_recording_parts_changes_no_bit(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.autograd.grad
    models = [toy().float(), toy().float()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]

    def steps(number: int) -> None:
        for tokens, labels in batches(2):
            for rows in range(2):
                loss_of(models[number], tokens[rows::2], labels[rows::2], 48).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()

    steps(0)
    with record(tmp_path / "t", models[1], steps=2, what=WHAT):
        steps(1)
    for plain, watched in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain, watched)
    assert (torch.autograd.backward, torch.autograd.grad) == before


class AddsByItself(torch.autograd.Function):
    """A linear layer that adds to the gradient by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.grad = x.T @ grads[0]
        return grads[0] @ ctx.weight.detach().T, None


def test_what_was_not_seen_is_said(tmp_path: Path) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.eye(2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with record(tmp_path / "t", model, what=("grads", "microbatch_grads")):
        x = torch.ones(1, 2, requires_grad=True)
        AddsByItself.apply(x, model["w"]).sum().backward()
        optimizer.step()
    with TraceReader(tmp_path / "t") as reader:
        (note,) = reader.ranks[0].not_recorded
    assert note["name"] == "w (microbatch_grads)"
    assert "adds to the gradient by itself" in note["why"]


def refuse(folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        record(folder, toy(), what=WHAT)
    return str(caught.value)


@pytest.mark.ranks
def test_parts_of_unknown_axes_are_refused(tmp_path: Path) -> None:
    for said in run_on_ranks(refuse, 2, str(tmp_path)):
        assert "what='microbatch_grads' needs mesh= in a run of 2 ranks" in said
