"""Tensor parallelism of whole models on real ranks, against one device; and what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import paralign.program
from paralign.collectives import all_reduce_backward
from paralign.config.run import RunConfig
from paralign.local_weights import local_parameters
from paralign.models.llama.blueprint import LlamaBlueprint
from paralign.models.pangu_moe.blueprint import PanguMoeBlueprint
from paralign.models.registry import find_model
from paralign.parallel.tensor import TensorPlan, spreads_of, tensor_problems
from paralign.parallel.tensor_base import Region, TensorParallel
from paralign.parallel.tensor_styles import (
    ColumnParallel,
    RowParallel,
    SharedInput,
    TokenWise,
    VocabularyParallel,
)
from paralign.parallel.tensor_weights import Spread
from paralign.testing import run_on_ranks
from tests import parity
from tests.parity import GRAD_TOLERANCE, PANGU, check_result, make_config, measure_all

LLAMA = parity.BASE["model"]
OFF = {"sequence_parallel": False}
CHUNKS = {"overlap": "chunks"}


def pieces(name: str = "llama", **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    entry = find_model(name)
    preset = "tiny" if name == "llama" else "tiny_dense"
    config = entry.configure(preset, hyper_parameters={"bias": True, **changes})
    with torch.device("meta"):
        return entry.build(config), entry.blueprint(config).tensor_parallel()


def spreads(name: str, degree: int, *, sequence_parallel: bool = True) -> dict[str, Spread]:
    model, plan = pieces(name)
    options = TensorParallel(sequence_parallel=sequence_parallel)
    return spreads_of(model, plan, degree=degree, options=options)


def problems(model: nn.Module, plan: TensorPlan, degree: int = 2) -> list[str]:
    return tensor_problems(model, plan, degree=degree, options=TensorParallel())


WHOLE, SUMMED = Spread(dim=None), Spread(dim=None, is_partial=True)
ROWS, COLUMNS = Spread(dim=0), Spread(dim=1)


def test_every_parameter_has_one_spread():
    for name in ("llama", "pangu_moe"):
        for degree in (2, 4):
            model, plan = pieces(name)
            assert problems(model, plan, degree) == []
            assert spreads(name, degree).keys() == {n for n, _ in model.named_parameters()}


def test_weights_are_cut_by_heads_features_and_vocabulary():
    found = spreads("llama", 2)
    assert {n: found[f"layers.0.attention.{n}"] for n in ("wq.weight", "wk.bias", "wo.weight")} == {
        "wq.weight": ROWS,
        "wk.bias": ROWS,
        "wo.weight": COLUMNS,
    }
    assert (found["embedding.weight"], found["head.weight"], found["head.bias"]) == (ROWS,) * 3
    assert found["layers.3.ffn.down.weight"] == COLUMNS


def test_only_the_plan_knows_which_replicated_gradients_are_partial_sums():
    def partial(name: str, degree: int, *, sequence_parallel: bool = True) -> set[str]:
        found = spreads(name, degree, sequence_parallel=sequence_parallel)
        mine = {n: s for n, s in found.items() if n.startswith(("layers.0", "norm"))}
        assert all(s.dim is None for s in mine.values() if s.is_partial)
        return {n.removeprefix("layers.0.") for n, s in mine.items() if s.is_partial}

    on_stream = {"attention_norm.weight", "ffn_norm.weight", "norm.weight", "ffn.down.bias"}
    assert partial("llama", 2) == on_stream | {"attention.wo.bias"}
    assert partial("llama", 2, sequence_parallel=False) == set()
    # Two key/value heads for four ranks: each rank's gradient is that of its query heads.
    shared = {f"attention.{w}.{leaf}" for w in ("wk", "wv") for leaf in ("weight", "bias")}
    assert partial("llama", 4) == on_stream | {"attention.wo.bias"} | shared
    assert partial("llama", 4, sequence_parallel=False) == shared
    latents = {f"attention.{w}_down.{leaf}" for w in ("q", "kv") for leaf in ("weight", "bias")}
    latents |= {"attention.q_norm.weight", "attention.kv_norm.weight", "attention.out.bias"}
    assert partial("pangu_moe", 4) == on_stream | latents
    assert partial("pangu_moe", 4, sequence_parallel=False) == set()


def test_a_plan_that_does_not_fit_the_model_is_refused_by_name():
    model, plan = pieces()
    assert "Blueprint.tensor_parallel()" in problems(model, {})[0]
    assert problems(model, {**plan, "layers.*.atention.wq": TokenWise()}) == [
        "tensor_parallel() has 'layers.*.atention.wq', which matches no module. Did you mean "
        "'layers.*.attention.wq'?"
    ]
    assert problems(model, {**plan, "layers.1.ffn": TokenWise()}) == [
        "layers.1.ffn has two styles, of 'layers.*.ffn' and 'layers.1.ffn'. Keep one"
    ]
    [missing] = problems(model, {k: v for k, v in plan.items() if k != "norm"})
    assert missing.startswith("no style covers norm.weight. Add its module to tensor_parallel()")
    twice = problems(model, {**plan, "layers.*.ffn": TokenWise()})
    assert (
        "layers.0.ffn.gate.weight is covered twice, by layers.0.ffn and layers.0.ffn.gate"
        in (twice[0])
    )
    assert problems(model, {**plan, "norm": RowParallel()}) == [
        "norm: it is for nn.Linear, not RMSNorm"
    ]


def test_sizes_that_do_not_divide_are_named():
    model, plan = pieces(vocab_size=257, ffn_hidden_size=129, num_layers=1)
    assert problems(model, plan) == [
        "embedding: num_embeddings=257 does not split evenly over axis 'tp' (2 ranks, remainder 1)",
        *(
            f"layers.0.ffn.{name}_features=129 does not split evenly over axis 'tp' (2 ranks, "
            "remainder 1)"
            for name in ("gate: out", "up: out", "down: in")
        ),
        "head: out_features=257 does not split evenly over axis 'tp' (2 ranks, remainder 1)",
    ]
    model, plan = pieces(num_layers=1)
    assert problems(model, plan, 3)[1] == (
        "layers.0.attention.wq: num_heads=4 and axis 'tp' (3 ranks): one must be a multiple of the "
        "other"
    )


def test_a_tied_parameter_is_spread_in_one_way():
    model, plan = pieces(tie_embeddings=True)
    assert problems(model, plan) == []
    assert problems(model, {**plan, "head": TokenWise()}) == [
        "embedding.weight and head.weight are one parameter spread in two ways: replicate, shard(0)"
    ]


# On ranks: mesh -> configs that one world runs.
def pipe(schedule: str, num_microbatches: int) -> dict[str, Any]:
    return {"schedule": schedule, "num_microbatches": num_microbatches}


MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp dp_shard tp": {"pp": 2, "dp_shard": 2, "tp": 2},
    "dp_shard cp tp": {"dp_shard": 2, "cp": 2, "tp": 2},
    "dp_replicate dp_shard tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "pp tp4": {"pp": 2, "tp": 4},
}
TIED = {**LLAMA, "tie_embeddings": True}
CASES: dict[str, list[dict[str, Any]]] = {
    "tp4": [
        {},
        {"model": PANGU, "tensor": CHUNKS},
    ],
    "pp dp_shard tp": [
        {"model": PANGU, "pipeline": pipe("GPipe", 1), "fsdp": {"wrap": "first_block"}},
        {"model": TIED, "pipeline": pipe("ZBVZeroBubble", 4), "tensor": CHUNKS},
    ],
}
MORE_CASES: dict[str, list[dict[str, Any]]] = {
    "tp2": [{"model": PANGU}, {"model": TIED, "tensor": OFF, "pipeline": pipe("GPipe", 1)}],
    "tp4": [
        {"tensor": OFF},
        {"model": PANGU, "tensor": OFF, "pipeline": pipe("GPipe", 1)},
        {"model": PANGU, "pipeline": pipe("DualPipeV", 4)},
    ],
    "dp_shard cp tp": [
        {"pipeline": pipe("GPipe", 1), "context": {"ulysses_degree": 1, "load_balance": True}},
        {"model": PANGU, "pipeline": pipe("1F1B", 4)},
    ],
    "pp dp_shard tp": [
        {"model": TIED, "pipeline": pipe("ZBVZeroBubble", 4)},
        {"pipeline": pipe("ZBVZeroBubble", 4), "tensor": OFF},
        {"model": PANGU, "pipeline": pipe("Interleaved1F1B", 4), "tensor": OFF},
        {"model": TIED, "pipeline": pipe("1F1B", 2), "fsdp": {"wrap": "root"}},
        {
            "pipeline": pipe("1F1B", 2),
            # FSDP gathers these weights after attention has gathered its input.
            "fsdp": {"wrap": [["layers.0.attention.wq"], ["layers.1.ffn.gate"], ["head"]]},
            "tensor": CHUNKS,
        },
    ],
    "dp_replicate dp_shard tp": [{"pipeline": pipe("1F1B", 2)}],
    "pp tp4": [
        {"model": PANGU, "pipeline": pipe("InterleavedZeroBubble", 4)},
        {"pipeline": pipe("LoopedBFS", 2), "tensor": OFF, "align": {"steps": 2}},
    ],
}


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", CASES)
def test_every_gradient_is_that_of_one_device(mesh: str):
    check_cases(mesh, CASES[mesh])


@pytest.mark.long
@pytest.mark.parametrize("mesh", MORE_CASES)
def test_every_gradient_of_more_plans_is_that_of_one_device(mesh: str):
    check_cases(mesh, MORE_CASES[mesh])


def check_cases(mesh: str, cases: list[dict[str, Any]]) -> None:
    configs = [make_config(mesh=MESHES[mesh], **case) for case in cases]
    for case, result in zip(cases, measure_all(configs), strict=True):
        try:
            check_result(result)
        except AssertionError as error:
            raise AssertionError(f"{mesh}: {case}") from error
        assert result.clipped


# Broken on purpose: each function breaks this rank, and says which parameters must be off.


def _replace(owner: Any, attribute: str, value: Any) -> None:
    mock.patch.object(owner, attribute, value).start()


def _change_plan(blueprint: type, pattern: str, style: Any) -> None:
    plan = blueprint.tensor_parallel  # type: ignore[attr-defined]
    _replace(blueprint, "tensor_parallel", lambda self: {**plan(self), pattern: style})


class _Unsummed(RowParallel):
    """Keep this rank's part of the tokens of what it computed alone."""

    def run(self, module: nn.Module, call: Callable[..., Any], region: Region) -> Any:
        part = region.rank

        def alone(x: Tensor) -> Tensor:
            return x.chunk(region.degree, 1)[part] * region.degree

        region.leave = alone  # type: ignore[method-assign]
        return super().run(module, call, region)


class _ReducedTwice(SharedInput):
    def run(self, module: nn.Module, call: Callable[..., Any], region: Region) -> Any:
        def twice(x: Tensor) -> Any:
            return call(all_reduce_backward(region.enter(x), group=region.group))

        return twice


class _Tiled(ColumnParallel):
    """Give neighbouring ranks heads in turn, where neighbours share one."""

    def _rows(self, module: nn.Module, region: Region) -> tuple[int, int]:
        assert isinstance(module, nn.Linear) and self.num_heads is not None
        width = module.out_features // self.num_heads
        return region.rank % self.num_heads * width, width


class _MaskOffByOne(VocabularyParallel):
    def run(self, module: nn.Module, call: Callable[..., Any], region: Region) -> Any:
        assert isinstance(module, nn.Embedding)
        size = module.num_embeddings // region.degree
        first = region.rank * size

        def forward(tokens: Tensor) -> Tensor:
            is_elsewhere = (tokens <= first) | (tokens >= first + size)
            with local_parameters(module):
                found = call((tokens - first).masked_fill(is_elsewhere, 0))
            return region.leave(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))

        return forward


def nothing() -> None:
    """The run that must be right."""


def attention_output_not_summed() -> None:
    _change_plan(LlamaBlueprint, "layers.*.attention.wo", _Unsummed())


def norm_gradients_not_reduced() -> None:
    _replace(paralign.program, "sum_partial_gradients", lambda parameters, group: None)


def shared_gradients_summed_where_they_are_whole() -> None:
    class Summed(TokenWise):
        def spreads(self, module: nn.Module, degree: int) -> dict[str, Spread]:
            return {name: SUMMED for name, _ in module.named_parameters()}

    _change_plan(LlamaBlueprint, "norm", Summed())


def rotary_key_reduced_twice() -> None:
    _change_plan(PanguMoeBlueprint, "layers.*.attention.rotary_key", _ReducedTwice())


def key_heads_tiled() -> None:
    _change_plan(LlamaBlueprint, "layers.*.attention.wk", _Tiled(num_heads=2))


def vocabulary_mask_off_by_one() -> None:
    _change_plan(LlamaBlueprint, "embedding", _MaskOffByOne())


# The word 97 is an "a", which text has.
VOCABULARY = {**LLAMA, "vocab_size": 4 * 97}
BROKEN: list[tuple[Callable[[], None], dict[str, Any]]] = [
    (nothing, {"model": VOCABULARY}),
    (attention_output_not_summed, {}),
    (norm_gradients_not_reduced, {}),
    (shared_gradients_summed_where_they_are_whole, {"tensor": OFF}),
    (rotary_key_reduced_twice, {"model": PANGU}),
    (key_heads_tiled, {}),
    (vocabulary_mask_off_by_one, {"model": VOCABULARY}),
]


def _broken_rank(
    configs: list[RunConfig], keys: list[str], references: dict[str, Any]
) -> list[parity.Outcome]:
    found = []
    for (break_it, _), config, key in zip(BROKEN, configs, keys, strict=True):
        break_it()
        found += parity._rank([(config, key)], (), references)
        mock.patch.stopall()
    return found


def wrong_gradients() -> dict[Callable[[], None], set[str]]:
    """Break a run in every way; return the parameters whose gradient is wrong."""
    small = {"num_layers": 2}
    configs = [
        make_config(
            **{
                **sections,
                "mesh": {"tp": 4},
                "pipeline": pipe("GPipe", 2),
                "model": {**sections.get("model", LLAMA), **small},
            }
        )
        for _, sections in BROKEN
    ]
    keys = [parity._reference_key(config) for config in configs]
    references = {
        key: parity._run_reference(c, ())
        for key, c in dict(zip(keys, configs, strict=True)).items()
    }
    values = {key: reference.values for key, reference in references.items()}
    outcomes = run_on_ranks(_broken_rank, 4, configs, keys, values)
    found = {}
    for number, (break_it, _) in enumerate(BROKEN):
        ranks = [outcome[number] for outcome in outcomes]
        result = parity._judge(configs[number], references[keys[number]], ranks)
        found[break_it] = {
            parameter
            for (kind, parameter), error in result.errors.items()
            if kind == "grad:0" and not error <= GRAD_TOLERANCE
        }
    return found


@pytest.mark.ranks
def test_what_is_broken_on_purpose_is_caught():
    wrong = wrong_gradients()
    assert wrong[nothing] == set()
    assert "layers.0.attention.wo.weight" in wrong[attention_output_not_summed]
    partial = {n for n, spread in spreads("llama", 4).items() if spread.is_partial}
    on_stream = {n for n in partial if not n.startswith(("layers.2", "layers.3"))}
    assert wrong[norm_gradients_not_reduced] == on_stream
    assert wrong[shared_gradients_summed_where_they_are_whole] == {"norm.weight"}
    rotary = wrong[rotary_key_reduced_twice]
    assert "layers.1.attention.kv_down.weight" in rotary
    assert "layers.1.attention.q_down.weight" not in rotary
    assert "layers.0.attention.wk.weight" in wrong[key_heads_tiled]
    assert "embedding.weight" in wrong[vocabulary_mask_off_by_one]
