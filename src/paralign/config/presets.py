"""Runs to start from, as functions: ``paralign init`` writes them, ``examples/`` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from paralign.config.nearest import suggest
from paralign.config.run import (
    AlignSection,
    BatchSection,
    ContextSection,
    DataSection,
    FsdpSection,
    LossSection,
    MeshSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RecomputeSection,
    RunConfig,
    TensorSection,
)
from paralign.errors import ConfigError

LLAMA = ModelSection(name="llama", preset="tiny")


def pp_fsdp_cp() -> RunConfig:
    """Return the main example: pipeline, FSDP and context parallel, two ranks each."""
    return RunConfig(
        model=LLAMA,
        mesh=MeshSection(pp=2, dp_shard=2, cp=2),
        pipeline=PipelineSection(schedule="GPipe", num_microbatches=4),
        data=DataSection(padding=0.25),
    )


def hsdp() -> RunConfig:
    """Return two copies of an FSDP run, with gathered K/V and a balanced sequence split."""
    return RunConfig(
        model=LLAMA,
        mesh=MeshSection(dp_replicate=2, dp_shard=2, cp=2),
        pipeline=PipelineSection(schedule="GPipe", num_microbatches=2),
        fsdp=FsdpSection(wrap="first_block", reshard_after_forward=True),
        context=ContextSection(ulysses_degree=1, load_balance=True),
        data=DataSection(padding=0.25),
    )


def pangu_dense() -> RunConfig:
    """Return latent attention and an uneven layer split, compared over three optimizer steps."""
    return RunConfig(
        # An extra key of the model section is a hyper-parameter of the model.
        model=ModelSection.model_validate(
            {"name": "pangu_moe", "preset": "tiny_dense", "num_layers": 5}
        ),
        mesh=MeshSection(pp=2, dp_shard=2, cp=2),
        pipeline=PipelineSection(schedule="1F1B", num_microbatches=2, layers_per_stage=(3, 2)),
        align=AlignSection(steps=3),
    )


def zero_bubble() -> RunConfig:
    """Return a V-shaped schedule that splits the backward pass, its parameters kept gathered."""
    return RunConfig(
        model=LLAMA,
        mesh=MeshSection(pp=2, dp_shard=4),
        pipeline=PipelineSection(schedule="ZBVZeroBubble", num_microbatches=4, stages_per_rank=2),
        fsdp=FsdpSection(reshard_after_forward=False),
        batch=BatchSection(global_batch=16),
    )


def pangu_moe_8() -> RunConfig:
    """Return the report's preset for 8 devices: tp=2, ep=4, sequence parallel, 3 rows at a time."""
    return _report(MeshSection(dp_shard=4, tp=2, ep=4), micro_batch=3, chunks=4, overlap="chunks")


def pangu_moe_4() -> RunConfig:
    """Return the report's preset for 4 devices: tp=2, ep=2."""
    return _report(MeshSection(dp_shard=2, tp=2, ep=2), micro_batch=3, chunks=4, overlap="chunks")


def pangu_moe_1() -> RunConfig:
    """Return the report's preset for one device: every axis is off, one row at a time."""
    return _report(MeshSection(), micro_batch=1, chunks=1, overlap="none")


def _report(
    mesh: MeshSection, *, micro_batch: int, chunks: int, overlap: Literal["none", "chunks"]
) -> RunConfig:
    """Return what the presets of the report share, on its demo sizes."""
    pieces = 2
    return RunConfig(
        model=ModelSection(name="pangu_moe", preset="demo"),
        mesh=mesh,
        pipeline=PipelineSection(schedule="1F1B", num_microbatches=pieces),
        tensor=TensorSection(overlap=overlap),
        recompute=RecomputeSection(
            parts=("*_norm", "attention.project", "ffn.experts.permute", "*.activate")
        ),
        batch=BatchSection(global_batch=mesh.dp_shard * pieces * micro_batch, seq_len=32),
        loss=LossSection(chunks=chunks),
        data=DataSection(padding=0.25),
        precision=PrecisionSection(compute="bfloat16", softmax="float32", logits="float32"),
    )


def pangu_moe_pp_fsdp() -> RunConfig:
    """Return experts in a pipeline over FSDP and tp, compared over five optimizer steps."""
    return RunConfig(
        model=ModelSection.model_validate(
            {
                "name": "pangu_moe",
                "preset": "tiny",
                "num_experts": 16,
                "top_k": 4,
                "bias": True,
            }
        ),
        mesh=MeshSection(pp=2, dp_shard=2, tp=2, ep=2),
        pipeline=PipelineSection(schedule="1F1B", num_microbatches=2),
        data=DataSection(padding=0.25),
        align=AlignSection(steps=5),
    )


PRESETS: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            pp_fsdp_cp,
            hsdp,
            pangu_dense,
            zero_bubble,
            pangu_moe_8,
            pangu_moe_4,
            pangu_moe_1,
            pangu_moe_pp_fsdp,
        )
    }
)
DEFAULT_PRESET = pp_fsdp_cp.__name__


def find_preset(name: str) -> RunConfig:
    """Return the run called ``name``.

    Raises:
        ConfigError: There is no such preset; the nearest name is suggested.
    """
    if name not in PRESETS:
        raise ConfigError(f"PRESET={name!r} is not a preset of a run. {suggest(name, PRESETS)}")
    return PRESETS[name]()
