"""Sections of a RUN.yaml that say how parameters move, and for how long."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from paralign.config.keys import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    count,
    key,
    natural,
    tuples,
)


class OptimizerSection(Section):
    """How parameters move after the gradients are final."""

    name: Literal["adamw", "sgd"] = key(
        "adamw",
        "adamw or sgd",
        expects="one of adamw, sgd",
        example="adamw",
        words="adamw, sgd",
    )
    lr: Positive = key(3.0e-4, "learning rate", expects="a number above 0", example="3.0e-4")
    betas: Annotated[tuple[Share, Share], BeforeValidator(tuples)] = key(
        (0.9, 0.95),
        "adamw: decay of the two moments",
        expects="a list of two numbers of at least 0 and below 1",
        example="[0.9, 0.95]",
    )
    eps: Positive = key(
        1.0e-8, "adamw: added to the denominator", expects="a number above 0", example="1.0e-8"
    )
    weight_decay: NonNegative = key(
        0.1, "weight decay", expects="a number of at least 0", example="0.1"
    )
    decay: Literal["all", "matrices"] = key(
        "all",
        "which parameters weight_decay is for: all; matrices: no biases and no norms",
        expects="all or matrices",
        example="matrices",
        words="all, matrices",
    )
    momentum: Share = key(
        0.0, "sgd: momentum", expects="a number of at least 0 and below 1", example="0.9"
    )
    clip: Positive | None = key(
        1.0,
        "largest gradient norm over all parameters; null: no clipping",
        expects="a number above 0, or null",
        example="1.0",
    )
    freeze: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(tuples)] = (
        key(
            (),
            "names of parameters that stay as they are, * for any text",
            expects="a list of names",
            example='["embedding.*", "layers.0.*"]',
        )
    )


class ScheduleSection(Section):
    """How the learning rate of `paralign train` changes; it ends at train.steps."""

    name: Literal["constant", "cosine", "wsd"] = key(
        "constant",
        "after the warm-up: constant; cosine down to the end; wsd: stable, then linear decay",
        expects="one of constant, cosine, wsd",
        example="cosine",
        words="constant, cosine, wsd",
    )
    warmup_steps: Natural = natural(0, "steps over which the rate grows to optimizer.lr", "100")
    decay_steps: Natural = natural(0, "wsd: last steps, in which the rate decays", "100")
    min_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = key(
        0.0,
        "cosine and wsd: share of optimizer.lr that the last step has",
        expects="a number from 0 to 1",
        example="0.1",
    )


class TrainSection(Section):
    """How long `paralign train` trains, and what it keeps."""

    steps: Count = count(100, "optimizer steps of the whole run", example="1000")
    dir: Annotated[str, Field(min_length=1)] = key(
        "runs/demo",
        "folder of the run: metrics, checkpoints; all ranks must see it",
        expects="the path of a folder",
        example="runs/demo",
    )
    seed: Natural = natural(0, "of weights and data", "0")
    accumulate: Count = count(1, "global batches whose gradients make one optimizer step")
    log_every: Count = count(10, "steps between two lines of progress", example="10")
    save_every: Natural = natural(
        0, "steps between two checkpoints; 0: only at the end of the run", "100"
    )
    keep: Count = count(2, "newest checkpoints that are kept")
    async_save: bool = key(
        True,
        "write checkpoints while training goes on",
        expects="true or false",
        example="true",
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "when a gradient is NaN or infinite: stop and name it; skip: name it, leave the step out",
        expects="stop or skip",
        example="skip",
        words="stop, skip",
    )
    check_every: Natural = natural(
        0,
        "steps between two looks at whether copies of a tensor on several ranks are the same bits; "
        "0: none",
        "100",
    )
    collect_garbage_every: Natural = natural(
        0, "steps between two collections of garbage, on all ranks at once; 0: as Python does", "50"
    )


class ValidationSection(Section):
    """Text that `paralign train` does not train on, and how often its loss is looked at."""

    every: Natural = natural(
        0, "steps between two validations, and one at the end of the run; 0: none", "100"
    )
    source: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "stdlib, or the path of a text file or folder; null: the last part of data.source",
        expects="stdlib, the path of a text file or folder, or null",
        example="text/held_out",
    )
    share: Share = key(
        0.05,
        "share of the rows of data.source that is held out, where there is no source",
        expects="a number of at least 0 and below 1",
        example="0.05",
    )
    batches: Count | None = key(
        None,
        "most batches of batch.global_batch rows that are looked at; null: all",
        expects="a whole number of at least 1, or null",
        example="20",
    )


class MetricsSection(Section):
    """What `paralign train` says of itself besides metrics.jsonl, and where."""

    peak_tflops: Positive | None = key(
        None,
        "dense peak of one device in precision.compute, in 10^12 operations a second; null: as "
        "known by its name",
        expects="a number above 0, or null",
        example="989.4",
    )
    tensorboard: bool = key(
        False,
        "write to train.dir/tensorboard as well; extra tensorboard",
        expects="true or false",
        example="true",
    )
    wandb: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "the project of Weights & Biases to write to as well, extra wandb; null: none",
        expects="the name of a project, or null",
        example="my-project",
    )
    wandb_mode: Literal["online", "offline"] = key(
        "online",
        "online; offline: into train.dir/wandb, for `wandb sync`",
        expects="online or offline",
        example="online",
        words="online, offline",
    )


class ProfileSection(Section):
    """Steps of `paralign train` that torch's profiler traces, into train.dir/profile."""

    first_step: Count | None = key(
        None,
        "first step that is traced; null: none",
        expects="a whole number of at least 1, or null",
        example="10",
    )
    steps: Count = count(3, "how many are", example="3")
    ranks: Annotated[tuple[Natural, ...], BeforeValidator(tuples)] | None = key(
        None,
        "ranks that write a file; null: all",
        expects="a list of whole numbers of at least 0, or null",
        example="[0]",
    )
