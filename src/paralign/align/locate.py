"""Where two runs part: the first tensor out of budget, and which modules are wrong by themselves.

One wrong module makes everything after it wrong. To tell them apart the model is run once more on
one device, and every output is exchanged for what the parallel run recorded, as soon as it has been
compared with it; so each module is judged given all that the parallel run computed before it.
The backward pass does the same with the gradients of outputs, and what is left of a parameter's
gradient is the parameter's own fault: a reduction, not a wrong gradient that came in.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align.activation_pair import Found, StepOutputs, token_dims
from paralign.align.activations import tensors_of
from paralign.align.budget import FP64_TENSOR, UNCALIBRATED_EPS, Budget
from paralign.align.module_names import named_modules
from paralign.align.names import named_parameters
from paralign.align.pair import Moment, Quantity, Side
from paralign.align.tensor_entry import Kind
from paralign.align.verdict import TensorRow
from paralign.errors import ConfigError
from paralign.layout import Box

_POSITIONS = ("positions", "position_ids", "input_pos")


@dataclass
class Isolated:
    """One tensor, given all that the parallel run computed before it."""

    kind: str
    name: str
    module: nn.Module
    error: float
    norm: float
    scale: float | None
    budget_eps: float
    eps: float = 0.0
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report stores it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "eps": self.eps,
            "budget_eps": self.budget_eps,
            "scale": self.scale,
            **_place_of(type(self.module)),
        }


def first_divergence(rows: Sequence[TensorRow]) -> dict[str, Any] | None:
    """Return kind, name and step of the first row out of budget; ``rows`` are in causal order."""
    for row in rows:
        if not row.ok:
            return {"kind": row.kind, "name": row.label, "step": row.step, "isolated": None}
    return None


@dataclass
class Isolation:
    """Runs a model on one device with what a parallel run recorded put in everywhere.

    Args:
        build: Returns the model as it runs on one device, with the reference's names.
        reference: The run to be equal to; gives the parameters.
        parallel: The run under test; gives parameters' gradients.
        outputs: What the modules of the run under test returned.
        tokens: The global batch, ``[rows, positions]``.
        step: The step.
        budget: Gives the unit of errors.
    """

    build: Callable[[], Any]
    reference: Side
    parallel: Side
    outputs: StepOutputs
    tokens: Tensor
    step: int
    budget: Budget
    found: list[Isolated] = field(default_factory=list)
    _last: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    def run(self) -> list[Isolated]:
        """Return what is wrong by itself, in causal order.

        Raises:
            ConfigError: The model cannot be built or run, or is not the one that was recorded.
        """
        model = self._model()
        handles = [
            part.module.register_forward_hook(self._hook(part.name))
            for part in named_modules(model, named_parameters([model]))
        ]
        try:
            with torch.enable_grad():
                self._forward(model)
                self._backward()
        finally:
            for handle in handles:
                handle.remove()
        self._gradients(model)
        self._judge()
        return [item for item in self.found if not item.ok]

    def _model(self) -> nn.Module:
        built = self.build()
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"model returned a {type(built).__name__}. It must return the nn.Module that runs "
                "on one device, with the names of the reference."
            )
        model = built.to(device="cpu", dtype=torch.float64)
        problems = []
        with torch.no_grad():
            for named in named_parameters([model]):
                quantity = self._parameter(named.name)
                if quantity is None or quantity.problems:
                    problems.append(f"{named.name} is not in the reference")
                elif tuple(quantity.shape) != tuple(named.parameter.shape):
                    problems.append(
                        f"{named.name} has shape {tuple(named.parameter.shape)}, but "
                        f"{quantity.shape} in the reference"
                    )
                else:
                    named.parameter.copy_(whole_of(quantity))
        if problems:
            raise ConfigError.from_problems("model is not the one that was recorded", problems)
        return model.train()

    def _parameter(self, name: str) -> Quantity | None:
        for moment in (
            Moment.of(self.step - 1, Kind.PARAM_AFTER),
            Moment.of(self.step, Kind.PARAM),
        ):
            quantity = self.reference.quantity(moment, name)
            if quantity is not None:
                return quantity
        return None

    def _forward(self, model: nn.Module) -> None:
        accepted = inspect.signature(model.forward).parameters
        places = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        kwargs = {name: places for name in _POSITIONS if name in accepted}
        try:
            model(self.tokens, **kwargs)
        except Exception as error:
            raise ConfigError(
                f"model does not run on tokens of shape {tuple(self.tokens.shape)}: "
                f"{type(error).__name__}: {error}. It must take tokens, and may take positions."
            ) from error

    def _backward(self) -> None:
        """Begin at the last outputs; hooks put in the recorded gradients from there on."""
        if self._last:
            tensors, grads = zip(*self._last, strict=True)
            torch.autograd.backward(tensors, grads)

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            suffix = f"#{call}" if call else ""
            recorded: dict[str, Tensor] = {}
            for place, tensor in tensors_of(output):
                exchanged = self._exchanged(module, f"{name}{place}{suffix}", tensor)
                if exchanged is not None:
                    recorded[place] = exchanged
            return _with(output, recorded) if recorded else None

        return hook

    def _exchanged(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
        """Compare an output with the recorded one and return that, in the same graph."""
        recorded = self._recorded(Kind.OUTPUT, name, tensor)
        grad = self._recorded(Kind.OUTPUT_GRAD, name, tensor)
        result = tensor
        if recorded is not None:
            self._note(Kind.OUTPUT, name, module, recorded, tensor)
            result = _Exchange.apply(tensor, recorded)  # type: ignore[no-untyped-call]
        elif grad is not None and tensor.requires_grad:
            result = tensor.view_as(tensor)
        if grad is None or not result.requires_grad:
            return None if result is tensor else result
        arrived: list[bool] = []

        def arrive(came: Tensor) -> Tensor:
            # What comes back to the last output is what was started with.
            if not any(item[0] is result for item in self._last) and not arrived:
                self._note(Kind.OUTPUT_GRAD, name, module, grad, came)
            arrived.append(True)
            return grad

        result.register_hook(arrive)
        self._last = [(result, grad)]
        return result

    def _recorded(self, kind: str, name: str, tensor: Tensor) -> Tensor | None:
        """Return what the parallel run recorded, laid out like ``tensor``."""
        if not tensor.is_floating_point():
            return None
        rows, positions = self.tokens.shape
        possible = token_dims(tensor.shape, int(rows), int(positions))
        if not possible or name not in self.outputs.names(kind):
            return None
        theirs = self.outputs.possible_dims(kind, name)
        agreed = [dims for dims in possible if (dims.rows, dims.positions) in theirs]
        dims = (agreed or possible)[0]
        own = {dims.rows, dims.positions}
        others = [dim for dim in range(tensor.dim()) if dim not in own]
        rest = tuple(int(tensor.shape[dim]) for dim in others)
        found = self.outputs.quantity(kind, name, rest, (dims.rows, dims.positions))
        if not isinstance(found, Found) or found.uncovered or found.is_guess:
            return None
        whole = whole_of(found.quantity)
        if dims.is_flat:
            return whole.reshape(tensor.shape)
        order = [0] * tensor.dim()
        for at, dim in enumerate((dims.rows, dims.positions, *others)):
            order[dim] = at
        return whole.permute(order).contiguous()

    def _gradients(self, model: nn.Module) -> None:
        moment = Moment.of(self.step, Kind.GRAD)
        for named in named_parameters([model]):
            quantity = self.parallel.quantity(moment, named.name)
            grad = named.parameter.grad
            if grad is None or quantity is None or quantity.problems or not quantity.is_present:
                continue
            if tuple(quantity.shape) == tuple(grad.shape):
                self._note(Kind.GRAD, named.name, named.owner, whole_of(quantity), grad)

    def _note(
        self, kind: str, name: str, module: nn.Module, recorded: Tensor, computed: Tensor
    ) -> None:
        computed = computed.detach()
        norm = float(torch.linalg.vector_norm(computed))
        error = float(torch.linalg.vector_norm(recorded - computed))
        dot = float((recorded * computed).sum())
        scale = dot / norm**2 if norm > 0 and math.isfinite(dot) else None
        self.found.append(Isolated(kind, name, module, error, norm, scale, self._budget_eps))

    @property
    def _budget_eps(self) -> float:
        if self.budget.dtype == "float64":
            return FP64_TENSOR.value
        return UNCALIBRATED_EPS[self.budget.dtype].value

    def _judge(self) -> None:
        largest: dict[str, float] = {}
        for item in self.found:
            largest[item.kind] = max(largest.get(item.kind, 0.0), item.norm)
        for item in self.found:
            # Below an eps of the largest of its kind it is rounding noise.
            unit = self.budget.eps * max(item.norm, self.budget.eps * largest[item.kind])
            item.eps = item.error / unit if unit else (0.0 if item.error == 0.0 else math.inf)
            item.ok = item.eps <= item.budget_eps


class _Exchange(torch.autograd.Function):
    """Another value in the place of a computed one; the gradient goes to the computed one."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, recorded: Tensor) -> Tensor:
        return recorded.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def whole_of(quantity: Quantity) -> Tensor:
    """Return a global tensor in fp64, all of it."""
    box = Box(tuple(0 for _ in quantity.shape), tuple(0 for _ in quantity.shape), quantity.shape)
    return quantity.fetch(box)


def _with(output: Any, tensors: Mapping[str, Tensor], place: str = "") -> Any:
    """Return what a module returned with some tensors exchanged."""
    if isinstance(output, Tensor):
        return tensors.get(place, output)
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        for key, value in output.items():
            changed[key] = _with(value, tensors, f"{place}[{key}]")
        return changed
    if isinstance(output, list | tuple):
        items = list(_items(output, tensors, place))
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def _items(output: Sequence[Any], tensors: Mapping[str, Tensor], place: str) -> Iterator[Any]:
    for number, value in enumerate(output):
        yield _with(value, tensors, f"{place}[{number}]")


def _place_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {"class": kind.__name__, "file": None, "line": None}
    try:
        found["file"] = inspect.getsourcefile(kind)
        found["line"] = inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):  # defined in a notebook or in C
        found["file"] = None
    return found
