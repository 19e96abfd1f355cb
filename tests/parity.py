"""Compares a parallel run with one device, tensor by tensor: the yardstick of these tests.

Every rank compares its own shards with the slices of the reference that it was given; sums of
squares come back and are added here, so nothing is gathered and no tool that is under test is
trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paralign.config.rules import find_problems
from paralign.config.run import RunConfig
from paralign.data.source import TokenSource
from paralign.launch import report_event
from paralign.layout import boxes, local_boxes
from paralign.mesh import build_mesh
from paralign.models.router import named_biases
from paralign.program import Program
from paralign.prove.reference import ReferenceStep
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_data,
    build_pieces,
    build_program,
    init_rule,
    initialise_whole,
    numerics,
)
from paralign.train.local_shards import on_local_shards
from paralign.train.optimizer import build_optimizer

EPS = torch.finfo(torch.float64).eps
# Correct runs stay under 10 eps; 100 leaves room for another summation order, not for a fault.
GRAD_TOLERANCE = 100 * EPS
LOSS_TOLERANCE = 1e-14
AFTER_STEP_TOLERANCE = 1e-12

# Weights well above the biases' jitter. With weights far below, values differ little from token to
# token, gradients of queries and keys are what is left after a cancellation, and the reference's
# own rounding shows in them 50 times enlarged.
INIT_STD = 0.2

BASE: Mapping[str, Any] = {
    "model": {
        "name": "llama",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "bias": True,
        "init_std": INIT_STD,
    },
    "pipeline": {"schedule": "1F1B", "num_microbatches": 4},
    "batch": {"global_batch": 16, "seq_len": 16},
    "data": {"padding": 0.5},
    "optimizer": {"lr": 1.0e-3, "clip": 0.05},
    "align": {"dtype": "float64", "jitter": 0.05},
}

PANGU: Mapping[str, Any] = {
    "name": "pangu_moe",
    "preset": "tiny_dense",
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "bias": True,
    "init_std": INIT_STD,
}

Values = dict[tuple[str, str], Tensor]  # (kind, parameter) -> values
# (kind, parameter) -> |difference|^2, |reference|^2, |what gradient noise explains|^2
Sums = dict[tuple[str, str], tuple[float, float, float]]


def make_config(**sections: Mapping[str, Any]) -> RunConfig:
    """Return the base config with keys of its sections replaced, checked by every static rule."""
    merged = {name: {**BASE.get(name, {}), **section} for name, section in sections.items()}
    if "name" in sections.get("model", {}):
        merged["model"] = dict(sections["model"])
    config = RunConfig.model_validate({**BASE, **merged})
    assert find_problems(config) == []
    return config


@dataclass(frozen=True, kw_only=True)
class Result:
    """How far a parallel run is from one device."""

    errors: dict[tuple[str, str], float]
    allowed: dict[tuple[str, str], float]
    """What noise within the gradients' tolerance makes of an update, relative as the errors are."""
    loss_error: float
    norm_error: float
    reductions: list[dict[str, int]]
    missing: set[tuple[str, str]] = field(default_factory=set)
    clipped: bool = False

    def worst(self, *kinds: str) -> tuple[float, tuple[str, str]]:
        """Return the largest error of these kinds and where it is; NaN counts as the largest."""
        chosen = [(e, key) for key, e in self.errors.items() if key[0].startswith(kinds)]
        assert chosen, f"nothing of {kinds} was compared"
        return max(chosen, key=lambda item: (item[0] != item[0], item[0]))


def measure(config: RunConfig, *, frozen: Sequence[str] = (), timeout: float = 120) -> Result:
    """Run ``config`` on one device here and on its ranks, and compare."""
    (result,) = measure_all([config], frozen=frozen, timeout=timeout)
    return result


def measure_all(
    configs: Sequence[RunConfig], *, frozen: Sequence[str] = (), timeout: float = 120
) -> list[Result]:
    """Do the same for several configs of one mesh, in one world."""
    keys = [_reference_key(config) for config in configs]
    references: dict[str, Reference] = {}
    for key, config in zip(keys, configs, strict=True):
        if key not in references:
            references[key] = _run_reference(config, frozen)
    degrees = configs[0].mesh.degrees
    outcomes = run_on_ranks(
        _rank,
        degrees.world_size,
        list(zip(configs, keys, strict=True)),
        tuple(frozen),
        {key: reference.values for key, reference in references.items()},
        timeout=timeout,
        describe=degrees.describe_rank,
    )
    return [
        _judge(config, references[key], [outcome[number] for outcome in outcomes])
        for number, (config, key) in enumerate(zip(configs, keys, strict=True))
    ]


def _judge(config: RunConfig, reference: Reference, outcomes: Sequence[Outcome]) -> Result:
    sums: dict[tuple[str, str], list[float]] = {}
    for outcome in outcomes:
        for key, part in outcome.sums.items():
            sums[key] = [a + b for a, b in zip(sums.get(key, (0.0, 0.0, 0.0)), part, strict=True)]
    clip = config.optimizer.clip
    return Result(
        errors={key: _relative(total[0], total[1]) for key, total in sums.items()},
        allowed={key: _relative(total[2], total[1]) for key, total in sums.items()},
        loss_error=max(_relative_numbers(reference.losses, one.losses) for one in outcomes),
        norm_error=max(_relative_numbers(reference.norms, one.norms) for one in outcomes),
        reductions=[one.reductions for one in outcomes],
        missing=set(reference.values) - set(sums),
        clipped=clip is not None and min(reference.norms) > clip,
    )


def check(config: RunConfig, *, frozen: Sequence[str] = ()) -> Result:
    """Assert that ``config`` is the same training run as on one device."""
    return check_result(measure(config, frozen=frozen))


def check_result(result: Result) -> Result:
    """Assert that a measured run is the same training run as on one device."""
    assert not result.missing, sorted(result.missing)[:5]
    error, where = result.worst("grad:0")
    assert error <= GRAD_TOLERANCE, f"{where}: {error / EPS:.3g} eps"
    assert result.loss_error <= LOSS_TOLERANCE
    assert result.norm_error <= LOSS_TOLERANCE
    # Gradients of later steps are those of weights that already differ by rounding.
    for where, error in result.errors.items():
        limit = AFTER_STEP_TOLERANCE + result.allowed[where]
        assert error <= limit, f"{where}: {error:.3g}, allowed {limit:.3g}"
    assert all(count <= 1 for counts in result.reductions for count in counts.values())
    return result


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match."""
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one device computed."""

    values: Values
    losses: list[float]
    norms: list[float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank computed, compared with the reference."""

    sums: Sums
    losses: list[float]
    norms: list[float]
    reductions: dict[str, int]


def _reference_key(config: RunConfig) -> str:
    names = {"model", "batch", "data", "optimizer", "align", "precision"}
    return config.model_dump_json(include=names)


def _run_reference(config: RunConfig, frozen: Sequence[str]) -> Reference:
    precision = numerics(config.align.dtype or "float64", config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    freeze(model, frozen)
    step = ReferenceStep(model, blueprint, precision, num_rows=4, dropout_seed=config.align.seed)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    names = dict(model.named_parameters())
    biases = named_biases([model])
    data = build_data(config)
    return Reference(**_train(config, names, biases, step, step.update_routers, clip, data))


def _rank(
    cases: Sequence[tuple[RunConfig, str]],
    frozen: Sequence[str],
    references: Mapping[str, Values],
) -> list[Outcome]:
    mesh = build_mesh(cases[0][0].mesh.degrees)
    outcomes = []
    # Looking up a source's files takes longer than a step.
    sources: dict[str, TokenSource] = {}
    for config, key in cases:
        if key not in sources:
            sources[key] = build_data(config)
        precision = numerics(config.align.dtype or "float64", config)
        program = build_program(
            config, precision, mesh=mesh, prepare=lambda model: freeze(model, frozen)
        )
        step = partial(_program_step, program)
        names = dict(program.named_parameters())
        biases = named_biases(program.modules)
        ran = _train(
            config,
            names,
            biases,
            step,
            program.update_routers,
            program.clip_grad_norm_,
            sources[key],
        )
        sums = _compare(program, names | biases, ran.pop("values"), references[key])
        outcomes.append(Outcome(sums=sums, reductions=program.num_reductions, **ran))
        report_event(key)
    return outcomes


def _program_step(program: Program, global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    batch = program.shard(global_batch)
    return program.step(batch), batch.num_global_tokens


def _train(
    config: RunConfig,
    names: Mapping[str, nn.Parameter],
    biases: Mapping[str, Tensor],
    step: Callable[[Mapping[str, Tensor]], tuple[Tensor, int]],
    update_routers: Callable[[], None],
    clip: Callable[[float], Tensor],
    data: TokenSource,
) -> dict[str, Any]:
    optimizer = build_optimizer(config.optimizer, names.items())
    before = {name: _local(parameter.detach()).clone() for name, parameter in names.items()}
    values: Values = {}
    losses, norms = [], []
    for number in range(config.align.steps):
        losses.append(float(step(data.global_batch(number))[0]))
        values |= {
            (f"grad:{number}", name): _local(parameter.grad).clone()
            for name, parameter in names.items()
            if parameter.grad is not None
        }
        norms.append(float(clip(config.optimizer.clip or float("inf"))))
        update_routers()
        with on_local_shards():
            optimizer.step()
        optimizer.zero_grad()
    values |= _after(names, before, optimizer)
    values |= {("param", name): bias.clone() for name, bias in biases.items()}
    return {"values": values, "losses": losses, "norms": norms}


def _after(
    names: Mapping[str, Tensor], before: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Values:
    values: Values = {}
    for name, parameter in names.items():
        values["param", name] = _local(parameter.detach()).clone()
        if parameter.requires_grad:
            values["update", name] = _local(parameter.detach()) - before[name]
        for state, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.dim():
                values[f"moment:{state}", name] = _local(value)
    return values


def _compare(
    program: Program, names: Mapping[str, Tensor], values: Values, expected: Values
) -> Sums:
    sums: Sums = {}
    for (kind, name), local in values.items():
        canonical = program.tied_aliases.get(name, name)
        whole = expected.get((kind, canonical))
        assert whole is not None, f"{kind} {name} exists only in the parallel run"
        reference = _slice(names[name], local, whole)
        parts = [(local - reference), reference, torch.zeros(())]
        if kind in ("update", "param"):
            update = expected.get(("update", canonical), torch.zeros_like(whole))
            parts[2] = _slice(names[name], local, _amplified(canonical, update, expected))
        total = [float(part.double().square().sum()) for part in parts]
        old = sums.get((kind, canonical), (0.0, 0.0, 0.0))
        sums[kind, canonical] = (old[0] + total[0], old[1] + total[1], old[2] + total[2])
    return sums


def _amplified(name: str, update: Tensor, expected: Values) -> Tensor:
    """Return how far noise within the gradients' tolerance may move each element of an update.

    Adam divides an element by its own size, so an element's update is relatively no more off than
    its gradient is, and noise of the size of the whole gradient's weighs most where that is small.
    A gradient of exactly zero has no noise: nothing flowed into it.
    """
    noise = torch.zeros_like(update)
    for (kind, parameter), grad in expected.items():
        if kind.startswith("grad") and parameter == name:
            spread = GRAD_TOLERANCE * grad.square().mean().sqrt()
            noise = torch.maximum(noise, torch.where(grad == 0, 0.0, spread / grad.abs()))
    return update * noise.clamp(max=2.0)


def _slice(parameter: Any, local: Tensor, whole: Tensor) -> Tensor:
    if not hasattr(parameter, "device_mesh"):
        return whole  # a router's bias
    mesh = parameter.device_mesh
    held = local_boxes(
        whole.shape,
        parameter.placements,
        mesh.shape,
        mesh.get_coordinate(),
        held_shape=tuple(local.shape),
    )
    pieces = boxes(held)
    if not pieces:
        return torch.zeros_like(local)
    (box,) = pieces
    return whole[tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _relative(difference: float, reference: float) -> float:
    if difference == 0:
        return 0.0
    return float("inf") if reference == 0 else (difference / reference) ** 0.5


def _relative_numbers(expected: Sequence[float], got: Sequence[float]) -> float:
    assert len(expected) == len(got) > 0
    return max(abs(a - b) / abs(a) for a, b in zip(expected, got, strict=True))
