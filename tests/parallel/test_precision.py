"""Parts that stay in float32 under bfloat16: the same policy in parallel as on one device.

A pipeline stage does what one device does with the same rows, kernel by kernel, so that two runs in
bfloat16 agree to float32's rounding where they follow one policy, and differ by bfloat16's, 10,000
times more, where a rank follows another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import paralign as pa
import paralign.parallel.data
import paralign.parallelize
from examples.own_model import OwnBlueprint, build
from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.models.experts import Experts
from paralign.parallel.data import PARTS, Precision
from paralign.parallel.precision import apply_precision, precision_problems
from paralign.parallel.stage import boundary_tensors, meta_copy
from paralign.planning import check_precision
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
from tests import parity
from tests.equivalence.test_moe import MODELS
from tests.parity import PANGU, make_config, measure_all

WIDE = torch.float32
LOW = torch.bfloat16
ONE_POLICY = 1e-6  # float32's rounding, a few sums deep
OTHER_POLICY = 1e-4  # less than what bfloat16's rounding of one part changes
ALIGN = {**parity.BASE["align"], "dtype": "bfloat16"}
ALL = dict.fromkeys(PARTS, "float32")
CHOICES: dict[str, dict[str, str]] = {part: {part: "float32"} for part in PARTS} | {"all": ALL}


def low(choice: str = "all", **sections: Any) -> RunConfig:
    precision = {"compute": "bfloat16", **CHOICES.get(choice, {}), **sections.pop("precision", {})}
    return make_config(**{"align": ALIGN, "precision": precision, **sections})


def own(dtype: torch.dtype = LOW) -> tuple[nn.Module, Blueprint]:
    torch.manual_seed(0)
    return build(num_layers=2).to(dtype), OwnBlueprint()


def test_a_part_that_cannot_be_honoured_is_refused_with_the_fix():
    model, blueprint = own(WIDE)
    assert precision_problems(model, blueprint, Precision()) == []
    good = Precision(compute=LOW, softmax=WIDE, logits=WIDE, residual=WIDE)
    check_precision(model, blueprint, good)
    [told] = precision_problems(model, blueprint, Precision(compute=LOW, softmax=LOW))
    assert told == "softmax=bfloat16 must be float32, or None for the compute dtype"
    [told] = precision_problems(model, blueprint, Precision(residual=WIDE))
    assert told == (
        "residual=float32 has no effect on compute=float32, which is not less. Leave residual out, "
        "or compute in bfloat16"
    )
    bare: Blueprint = OwnBlueprint()
    bare.head_name, bare.stream_sources, bare.stream_readers = None, (), ("blocks.*.nrom1",)
    bare.attention = dict  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        check_precision(model, bare, good)
    told = str(caught.value)
    for part in (
        "softmax=float32 needs the attention core, and the blueprint names none",
        "residual=float32 needs stream_sources of the blueprint, which is empty",
        "stream_readers has 'blocks.*.nrom1', which matches no module",
        "logits=float32 needs the module that makes the logits",
    ):
        assert part in told


def seen_dtypes(precision: Precision) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return what every module of the model takes and gives in one forward pass."""
    model, blueprint = own()
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = args[0].dtype, output.dtype

        return hook

    apply_precision(model, blueprint, precision)
    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    logits = model(torch.arange(12).view(2, 6))
    seen["model"] = LOW, logits.dtype
    logits.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {LOW}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return seen


def test_each_part_and_nothing_else_is_in_float32():
    plain = seen_dtypes(Precision(compute=LOW))
    assert {given for _, given in plain.values()} == {LOW}
    logits = seen_dtypes(Precision(compute=LOW, logits=WIDE))
    assert {name for name in plain if logits[name] != plain[name]} == {"", "lm_head", "model"}
    assert logits["lm_head"] == (LOW, WIDE)
    assert seen_dtypes(Precision(compute=LOW, softmax=WIDE)) == plain  # inside the core alone
    stream = seen_dtypes(Precision(compute=LOW, residual=WIDE))
    assert stream["embedding"][1] == WIDE
    for norm in ("blocks.0.norm1", "blocks.1.norm2", "final_norm"):
        assert stream[norm] == (WIDE, LOW)
    assert stream["blocks.0"] == stream["blocks.1"] == (WIDE, WIDE)
    for name in ("blocks.0.attention", "blocks.1.down", "lm_head"):
        assert stream[name] == (LOW, LOW)


def test_attention_sees_float32_and_keeps_its_signature():
    model, blueprint = own()
    core = model.get_submodule("blocks.0.attention.core")
    seen: list[torch.dtype] = []
    real = core.forward

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        seen.extend(x.dtype for x in (q, k, v, mask))
        return real(q, k, v, mask)

    core.forward = watched
    apply_precision(model, blueprint, Precision(compute=LOW, softmax=WIDE))
    q, mask = torch.randn(1, 2, 4, 8).to(LOW), torch.ones(4, 4)
    out = core(q, q, q, mask=mask)
    assert (out.dtype, seen) == (LOW, [WIDE] * 4)
    # Bitwise what the core gives in float32, rounded once.
    assert torch.equal(out, real(q.float(), q.float(), q.float(), mask).to(LOW))


def test_a_stream_that_loses_its_dtype_is_refused_before_a_step():
    model, blueprint = own(WIDE)
    skeleton = meta_copy(model, LOW)
    precision = Precision(compute=LOW, residual=WIDE)
    apply_precision(skeleton, blueprint, precision)

    def boundaries(blueprint: Blueprint) -> list[torch.dtype]:
        found = boundary_tensors(
            skeleton,
            blueprint,
            splits=[range(1), range(1, 2)],
            rows=2,
            local_seq=6,
            stream_dtype=WIDE,
        )
        return [out.dtype for _, out in found]

    assert boundaries(blueprint) == [WIDE, WIDE]

    class Narrow(OwnBlueprint):
        def layer(self, layer: nn.Module, x: Tensor, context: Tensor) -> Tensor:
            return super().layer(layer, x, context).to(LOW)

    with pytest.raises(ConfigError, match=r"blocks.0 returns torch.bfloat16.*stream_readers"):
        boundaries(Narrow())


def one_device_gradients(config: RunConfig) -> dict[str, Tensor]:
    precision = numerics("bfloat16", config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=0)
    ReferenceStep(model, blueprint, precision, num_rows=4)(build_data(config).global_batch(0))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(got: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert got.keys() == right.keys()
    return max(float((got[n] - right[n]).norm() / right[n].norm()) for n in right)


def test_every_option_acts_on_one_device():
    plain = one_device_gradients(low("none"))
    for choice in CHOICES:
        assert worst(one_device_gradients(low(choice)), plain) > OTHER_POLICY, choice


def test_in_float32_and_float64_nothing_is_wrapped():
    config = low("all")
    for dtype in ("float32", "float64"):
        precision = numerics(dtype, config).precision
        assert precision == Precision()


TWO = {"schedule": "GPipe", "num_microbatches": 2}
# Mesh -> runs in one world. Four rows go through at once on one device and on every rank.
RUNS: dict[str, list[dict[str, Any]]] = {
    "pp": [{"choice": choice} for choice in ("none", *CHOICES)]
    + [
        {"choice": "all", "model": PANGU},
        {"choice": "all", "loss": {"chunks": 1}, "fsdp": {"wrap": "root"}},
        # What is computed again is computed in the same dtypes.
        {"choice": "all", "recompute": {"parts": "block"}},
        {"choice": "all", "recompute": {"parts": ["*_norm", "attention.core", "ffn.up"]}},
        {"choice": "all", "model": MODELS["pangu_moe"], "recompute": {"parts": ["*_norm", "ffn"]}},
    ],
    "dp_shard": [
        {"choice": choice, "pipeline": TWO, "model": model}
        for choice in ("none", "all")
        for model in (parity.BASE["model"], MODELS["mixtral"])
    ],
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[pytest.mark.long] if m == "pp" else []) for m in RUNS]
)
def test_one_policy_gives_one_result(mesh):
    configs = [low(mesh={mesh: 2}, **run) for run in RUNS[mesh]]
    for run, result in zip(RUNS[mesh], measure_all(configs), strict=True):
        error, where = result.worst("grad:0")
        assert error <= ONE_POLICY, (run, where)
        assert result.loss_error <= ONE_POLICY
        assert not result.missing


@pytest.mark.ranks
@pytest.mark.parametrize(
    "wrap", ["blocks", *(pytest.param(w, marks=pytest.mark.long) for w in ("root", "first_block"))]
)
def test_micro_batches_are_added_in_the_reduce_dtype_under_every_schedule(wrap):
    ordinary = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
    configs = [
        low("none", mesh={"pp": 2}, fsdp={"wrap": wrap}, pipeline={"schedule": s}) for s in ordinary
    ]
    # Zero-bubble kinds would add them in bfloat16, and are refused (test_support); one is no sum.
    # DualPipeV needs at least 2 * pp of them.
    configs += [
        low(
            "none",
            mesh={"pp": 2},
            fsdp={"wrap": wrap},
            pipeline={"schedule": s, "num_microbatches": 1},
            batch={"global_batch": 4},
        )
        for s in ("InterleavedZeroBubble", "ZBVZeroBubble")
    ]
    for config, result in zip(configs, measure_all(configs), strict=True):
        error, where = result.worst("grad:0")
        assert error <= ONE_POLICY, (config.pipeline.schedule, where)


def _only_rank_1(wrong: Precision) -> None:
    """Let rank 1 follow another policy than it was told, on the model that it runs."""
    if dist.get_rank() != 1:
        return
    real = apply_precision

    def other(root: nn.Module, blueprint: Blueprint, precision: Precision) -> None:
        is_meta = any(p.is_meta for p in root.parameters())
        # The skeleton, which gives shapes and dtypes of what is sent, is as on the other rank.
        is_skeleton = is_meta and not hasattr(root, "layer_names")
        real(root, blueprint, precision if is_skeleton else wrong)

    mock.patch.object(paralign.parallelize, "apply_precision", other).start()


def _stream_in_bfloat16() -> None:
    _only_rank_1(Precision(compute=LOW, softmax=WIDE, logits=WIDE))
    if dist.get_rank() == 1:
        from paralign.parallel.stage import Stage

        forward = Stage.forward

        def narrow(self: Stage, x: Tensor, **batch: Tensor) -> Tensor:
            return forward(self, x if self.is_first else x.to(LOW), **batch)

        mock.patch.object(Stage, "forward", narrow).start()


def _softmax_in_bfloat16() -> None:
    _only_rank_1(Precision(compute=LOW, logits=WIDE, residual=WIDE))


def _logits_in_bfloat16() -> None:
    _only_rank_1(Precision(compute=LOW, softmax=WIDE, residual=WIDE))


def _sums_in_bfloat16() -> None:
    policy = MixedPrecisionPolicy

    def narrow(**settings: Any) -> Any:
        return policy(**{**settings, "reduce_dtype": LOW})

    mock.patch.object(paralign.parallel.data, "MixedPrecisionPolicy", narrow).start()


BROKEN = {
    "nothing": lambda: None,
    "residual": _stream_in_bfloat16,
    "softmax": _softmax_in_bfloat16,
    "logits": _logits_in_bfloat16,
    "sums": _sums_in_bfloat16,
}


SHARDED = {"mesh": {"dp_shard": 2}, "pipeline": {"schedule": "GPipe", "num_microbatches": 1}}
# Broken in what way, on which run: one micro-batch a rank has nothing to add up but ranks.
BROKEN_RUNS = {name: (name, {"mesh": {"pp": 2}}) for name in BROKEN} | {
    "sums over ranks": ("sums", {**SHARDED, "batch": {"global_batch": 8}}),
    "nothing, ranks": ("nothing", {**SHARDED, "batch": {"global_batch": 8}}),
}
DAILY = {"nothing", "softmax", "sums"}


def broken_gradients(name: str, config: RunConfig) -> dict[str, Tensor]:
    BROKEN[name]()
    program = build_program(config, numerics("bfloat16", config))
    program.step(program.shard(build_data(config).global_batch(0)))
    grads = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [c if c in DAILY else pytest.param(c, marks=pytest.mark.long) for c in BROKEN_RUNS],
)
def test_a_run_with_another_policy_is_seen(case):
    name, sections = BROKEN_RUNS[case]
    config = low("all", **sections)
    ours = run_on_ranks(broken_gradients, 2, name, config)
    error = worst(ours[0] | ours[1], one_device_gradients(config))
    assert error <= ONE_POLICY if name == "nothing" else error > OTHER_POLICY


def dtypes_of_routing(config: RunConfig) -> set[str]:
    """Return in what dtypes the experts of this rank see the weights of tokens."""
    seen: set[str] = set()
    real = Experts.forward

    def watched(self: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        seen.add(f"{x.dtype} {weights.dtype}".replace("torch.", ""))
        return real(self, x, indices, weights)

    with mock.patch.object(Experts, "forward", watched):
        program = build_program(config, numerics("bfloat16", config))
        program.step(program.shard(build_data(config).global_batch(0)))
    return seen


@pytest.mark.ranks
def test_experts_in_units_of_their_own_see_unrounded_weights_of_tokens():
    config = low("all", mesh={"dp_shard": 2, "ep": 2}, model=MODELS["mixtral"])
    for seen in run_on_ranks(dtypes_of_routing, 2, config):
        assert seen == {"bfloat16 float32"}


@pytest.mark.ranks
@pytest.mark.parametrize("choice", [pytest.param("none", marks=pytest.mark.long), "all"])
def test_clean_runs_are_aligned_by_the_float64_truth(choice):
    config = low(choice, mesh={"pp": 2, "tp": 2}, loss={"chunks": 3})
    report = pa.align(config)
    assert report.verdict == "aligned", report.why


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [{"cp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}]
)
@pytest.mark.parametrize("choice", ["none", *CHOICES])
@pytest.mark.parametrize("model", ["llama", "pangu_moe"])
def test_clean_runs_of_every_option_are_aligned(model, choice, mesh):
    sizes = PANGU if model == "pangu_moe" else parity.BASE["model"]
    report = pa.align(low(choice, mesh=mesh, model=sizes))
    assert report.verdict == "aligned", report.why
