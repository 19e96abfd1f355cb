"""A parallelised model, ready to train: what :func:`paralign.parallelize` returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.agreement import agree_on_loss, agree_on_shapes
from paralign.batch import LocalBatch, shard_batch
from paralign.blueprint import Blueprint
from paralign.errors import DataError
from paralign.layout import Part
from paralign.mesh import Axis, degrees_of
from paralign.models.router import named_biases, named_routers, take_balance_loss
from paralign.parallel.data import ReductionCounter, free_gathered
from paralign.parallel.gradients import give_back, take_gradients
from paralign.parallel.pipeline import PipelineRuntime
from paralign.parallel.stage import Stage
from paralign.parallel.stage_clock import StageClock
from paralign.parallel.support import Plan
from paralign.parallel.tensor_base import Returned
from paralign.parallel.tensor_weights import is_replicated, sum_partial_gradients
from paralign.parallel.tied import TiedPair, sum_pair
from paralign.router_updates import RouterUpdates


class Program:
    """This rank's part of a parallel training run.

    Built by :func:`paralign.parallelize`. Every gradient is final after :meth:`step`: a sum over
    all micro-batches and ranks, already divided by the number of valid tokens of the global batch.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, Stage],
        runtime: PipelineRuntime,
        mesh: DeviceMesh,
        plan: Plan,
        pairs: Sequence[TiedPair],
        counter: ReductionCounter,
        unused: Sequence[str],
        load_balance: bool,
        device: torch.device,
        token_parts: int = 1,
        takes_documents: bool = False,
        partial_over_tp: Collection[str] = (),
        has_router_biases: bool = False,
        returned: Mapping[str, Returned] | None = None,
        dropout_seed: int | None = None,
    ) -> None:
        self._stages = dict(stages)
        self._runtime = runtime
        self._mesh = mesh
        self._degrees = degrees_of(mesh)
        self._plan = plan
        self._pairs = list(pairs)
        self._aliases = {pair.alias: pair.canonical for pair in pairs}
        self._counter = counter
        self._unused = tuple(unused)
        self._load_balance = load_balance
        self._device = device
        self._token_parts = token_parts
        self._takes_documents = takes_documents
        self._tp_mesh = mesh[str(Axis.TP)]
        self._parameters = {
            name: parameter
            for stage in self._stages.values()
            for name, parameter in stage.named_parameters()
        }
        self._partial_over_tp = [p for n, p in self._parameters.items() if n in partial_over_tp]
        self._routers = named_routers(self._stages.values())
        self._loss_parts: dict[str, float] = {}
        self._returned = dict(returned or {})
        self._dropout_seed = dropout_seed  # None: no rank's part of the model drops anything
        self._router_updates = RouterUpdates(
            self._routers,
            self._parameters.values(),
            mesh,
            model_has_biases=has_router_biases,  # the same on ranks without a router
        )

    @property
    def mesh(self) -> DeviceMesh:
        """The run's mesh."""
        return self._mesh

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def plan(self) -> Plan:
        """The resolved pipeline and sharding plan."""
        return self._plan

    @property
    def blueprint(self) -> Blueprint:
        """How the model is cut."""
        return self._runtime.blueprint

    @property
    def skeleton(self) -> nn.Module:
        """The whole model on the meta device, as it was before it was cut: shapes, no weights."""
        return self._runtime.skeleton

    @property
    def clock(self) -> StageClock:
        """Measures how long this rank waits for other pipeline stages, once it is switched on."""
        return self._runtime.clock

    @property
    def modules(self) -> list[nn.Module]:
        """This rank's pipeline stages; their parameters have global names."""
        return list(self._stages.values())

    @property
    def tied_aliases(self) -> dict[str, str]:
        """Second copy of a tied parameter that two stages hold -> its canonical name."""
        return dict(self._aliases)

    @property
    def output_parts(self) -> dict[str, dict[str, Part]]:
        """Modules of this rank -> axis -> which part of their output it has, where it is cut."""
        return {name: {str(Axis.TP): part.value} for name, part in self._returned.items()}

    @property
    def output_grad_parts(self) -> dict[str, dict[str, Part]]:
        """The same of the gradients of outputs, which may be summands of it."""
        return {name: {str(Axis.TP): part.grad} for name, part in self._returned.items()}

    @property
    def num_reductions(self) -> dict[str, int]:
        """Gradient reductions of every unit of every stage in the last step."""
        return dict(self._counter.counts)

    @property
    def loss_parts(self) -> dict[str, float]:
        """What the last step's loss consists of: ``cross_entropy`` and ``balance`` of experts."""
        return dict(self._loss_parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, sharded; hand them to an optimizer."""
        yield from self._parameters.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their global names."""
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state by global name; one entry for a tied pair.

        Parameters are DTensors; router biases are plain tensors, equal on all ranks of a stage.
        """
        owned = {n: p.detach() for n, p in self._parameters.items() if n not in self._aliases}
        return owned | named_biases(self._stages.values())

    def shard(self, global_batch: Mapping[str, Tensor]) -> LocalBatch:
        """Cut this rank's rows and sequence slice out of the global batch.

        Pass the same global batch on every rank. See :func:`paralign.batch.shard_batch` for shapes
        and errors.
        """
        if "documents" in global_batch and not self._takes_documents:
            raise DataError(
                "the global batch has documents, and the model's blueprint does not look at them: "
                "attention would cross them. Build the mask and positions from them in the "
                "blueprint's context and forward and set takes_documents, or leave documents out."
            )
        local = shard_batch(
            global_batch,
            degrees=self._degrees,
            rank=self._mesh.get_rank(),
            num_microbatches=self._plan.num_microbatches,
            load_balance=self._load_balance,
            token_parts=self._token_parts,
            dropout_seed=self._dropout_seed,
        )
        for name, tensor in local.tensors.items():
            local.tensors[name] = tensor.to(self._device)
        return local

    def step(self, batch: LocalBatch, *, num_tokens: int | None = None) -> Tensor:
        """Run forward and backward of every micro-batch and add the gradients to ``.grad``.

        Comm:
            What the pipeline, the units and the attention cores do (see ``parallel/``), then one
            all-reduce of six numbers over the world. With a tied pair on two stages, one exchange
            of its shard between them. With tp, one all-reduce of the gradients that are partial
            sums over it. The first batch of a shape: one all-gather of the shape.

        Args:
            batch: What :meth:`shard` returned.
            num_tokens: What token losses are divided by; None: the valid tokens of this global
                batch. Pass the count over several batches to accumulate gradients over several
                calls.

        Returns:
            The loss of the global batch, a float64 scalar, equal on every rank: cross entropy, plus
            what routers add to balance their experts (see :attr:`loss_parts`).

        Raises:
            DataError: The ranks were given different global batches, or ``batch`` or ``num_tokens``
                is not what a step can take.
            AlignError: A unit was not reduced exactly once, a parameter got no gradient, or the
                optimizer has stepped without :meth:`update_routers`.
        """
        self._check_batch(batch, num_tokens)
        self._check_draws(batch)
        self._router_updates.check()
        copies = [self._copies(pair) for pair in self._pairs]
        tied = [parameter for pair in copies for parameter in pair if parameter is not None]
        self._counter.reset()
        earlier = take_gradients([*tied, *self._partial_over_tp])
        loss = self._runtime.step(
            batch.tensors,
            seq_len=batch.seq_len,
            normaliser=float(batch.num_global_tokens if num_tokens is None else num_tokens),
        )
        for pair, (canonical, alias) in zip(self._pairs, copies, strict=True):
            sum_pair(pair, canonical, alias, self._mesh)
        sum_partial_gradients(self._partial_over_tp, self._tp_mesh.get_group())
        give_back(earlier)
        self._router_updates.note_step()
        balance = take_balance_loss(self._routers.values())
        total, extra = self._agreed(loss, batch, self._reduction_problems(), balance)
        self._loss_parts = {"cross_entropy": total, "balance": extra}
        return torch.tensor(total + extra, dtype=torch.float64)

    def evaluate(self, batch: LocalBatch, *, num_tokens: int | None = None) -> Tensor:
        """Return the cross entropy of a global batch, without gradients, and change nothing.

        Modules are in evaluation mode meanwhile. Routers count nothing, gradients and what FSDP
        keeps of them stay as they are, and so does every random state, unless the model draws
        random numbers in evaluation mode.

        Comm:
            What the forward pass of :meth:`step` does, and one all-reduce of six numbers.

        Args:
            batch: What :meth:`shard` returned.
            num_tokens: As for :meth:`step`: sums over several batches, each divided by the count of
                all of them, are the loss of all.

        Returns:
            A float64 scalar, equal on every rank.

        Raises:
            DataError: As :meth:`step`.
        """
        self._check_batch(batch, num_tokens)
        with _evaluation_mode(self._stages.values()):
            loss = self._runtime.evaluate(
                batch.tensors,
                seq_len=batch.seq_len,
                normaliser=float(batch.num_global_tokens if num_tokens is None else num_tokens),
            )
        for stage in self._stages.values():
            free_gathered(stage)
        total, _ = self._agreed(loss, batch)
        return torch.tensor(total, dtype=torch.float64)

    def update_routers(self) -> None:
        """Move every router's bias by what all steps since the last call have counted.

        Call it once per optimizer step, between the last :meth:`step` and ``optimizer.step()``.
        Does nothing for a model without router biases, which needs no call.

        Comm:
            One all-reduce of a whole number per expert and layer of this rank, over ``routed``.
        """
        self._router_updates.update()

    def forget_routers(self) -> None:
        """Forget what routers have counted since the last update: of a step that is left out."""
        self._router_updates.forget()

    def clip_grad_norm_(self, max_norm: float, *, norm: Tensor | None = None) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``.

        Comm:
            One all-reduce of one number over the world, unless ``norm`` is given.

        Args:
            max_norm: The largest norm to leave.
            norm: What :meth:`grad_norm` has just returned.

        Returns:
            The norm before clipping, a float64 scalar, equal on every rank. Replicated and tied
            parameters count once.
        """
        norm = self.grad_norm() if norm is None else norm
        # The same formula as torch.nn.utils.clip_grad_norm_, so that a single device clips alike.
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in self._local_grads(self._parameters):
            grad.mul_(coefficient.to(grad.dtype))
        return norm

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of the model; see :meth:`clip_grad_norm_`."""
        owned = {n: p for n, p in self._parameters.items() if n not in self._aliases}
        whole = {n: p for n, p in owned.items() if is_replicated(p, Axis.TP)}
        cut = {n: p for n, p in owned.items() if n not in whole}
        # Replicas hold equal gradients: the sum over the world counts each dp_replicate times, and
        # what is not cut over tp that many times again. Experts are cut over it.
        squares = self._squares(cut) + self._squares(whole) / self._degrees.tp
        squares = (squares / self._degrees.dp_replicate).to(self._device)
        dist.all_reduce(squares)
        return squares.sqrt()

    def _squares(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        return torch.nn.utils.get_total_norm(self._local_grads(parameters)).double().square()

    def _local_grads(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        grads = [parameter.grad for parameter in parameters.values()]
        return [g.to_local() if hasattr(g, "to_local") else g for g in grads if g is not None]

    def _copies(self, pair: TiedPair) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        def copy(stage: int, name: str) -> nn.Parameter | None:
            return self._parameters[name] if stage in self._stages else None

        return copy(pair.stages[0], pair.canonical), copy(pair.stages[1], pair.alias)

    def _agreed(
        self,
        loss: Tensor | None,
        batch: LocalBatch,
        problems: Sequence[str] = (),
        balance: Tensor | None = None,
    ) -> tuple[float, float]:
        # Ranks along tp have the same tokens and the same loss: the first one counts.
        is_counted = loss is not None and self._tp_mesh.get_local_rank() == 0
        return agree_on_loss(
            loss if is_counted else None,
            batch,
            degrees=self._degrees,
            device=self._device,
            problems=problems,
            balance=balance,
        )

    def _check_batch(self, batch: LocalBatch, num_tokens: int | None) -> None:
        if not isinstance(batch, LocalBatch):
            raise DataError(
                f"batch is a {type(batch).__name__}; step needs this rank's share of the global "
                "batch. Use program.step(program.shard(global_batch))."
            )
        if num_tokens is not None and num_tokens < 1:
            raise DataError(
                f"num_tokens={num_tokens} must be at least 1: token losses are divided by it. Pass "
                "the sum of num_global_tokens over the batches whose gradients are added."
            )
        if not self._runtime.knows(batch.tensors["tokens"].shape):
            agree_on_shapes(batch, self._degrees)

    def _check_draws(self, batch: LocalBatch) -> None:
        if self._dropout_seed is not None and "draws" not in batch.tensors:
            raise DataError(
                "the model has dropout, and the global batch does not say which rows it has. Add "
                "samples: the number of each row in the order of the run, such as "
                "torch.arange(step * rows, (step + 1) * rows)."
            )

    def _reduction_problems(self) -> list[str]:
        """Make two cheap checks after every step: no communication, no tensor is read."""
        trained = {
            name: parameter.grad is not None
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
            and not any(fnmatchcase(name, pattern) for pattern in self._unused)
        }
        problems = [
            f"{name} is trainable and got no gradient. Freeze it, or list it in the blueprint's "
            "unused_parameters"
            for name, has_gradient in trained.items()
            if not has_gradient
        ]
        for unit, count in self._counter.counts.items():
            # A gradient may be what an earlier step left, so that there is one proves nothing.
            is_due = any(trained.get(name) for name in self._counter.parameters[unit])
            if count > 1 or (is_due and count == 0):
                shown = f"{unit}root" if unit.endswith(": ") else unit
                problems.append(
                    f"unit {shown!r} reduced its gradients {count} times in one step instead of "
                    "once"
                )
        return problems


@contextmanager
def _evaluation_mode(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, and back into the mode that each of them had."""
    was_training = [(module, module.training) for stage in stages for module in stage.modules()]
    for module, _ in was_training:
        module.training = False
    try:
        yield
    finally:
        for module, mode in was_training:
            module.training = mode
