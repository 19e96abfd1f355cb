"""Rules of the sections that say how parameters move, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.parse import show
from paralign.config.training import (
    MetricsSection,
    OptimizerSection,
    ProfileSection,
    ScheduleSection,
    TrainSection,
)


def optimizer_problems(optimizer: OptimizerSection) -> Iterator[str]:
    """Yield what is set and would not be used."""
    other = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[optimizer.name]
    for key in other:
        default = type(optimizer).model_fields[key].default
        if getattr(optimizer, key) != default:
            yield (
                f"optimizer.{key}={show(getattr(optimizer, key))} has no effect on "
                f"{optimizer.name}, and no setting is ignored. Remove {key}, or use "
                f"name: {'sgd' if optimizer.name == 'adamw' else 'adamw'}."
            )


def schedule_problems(schedule: ScheduleSection, train: TrainSection) -> Iterator[str]:
    """Yield what would not be used, and phases that do not fit into the run."""
    steps = train.steps
    if schedule.decay_steps and schedule.name != "wsd":
        yield (
            f"schedule.decay_steps={schedule.decay_steps} has no effect on {schedule.name}, and no "
            "setting is ignored. Remove decay_steps, or use name: wsd."
        )
    if schedule.min_ratio and schedule.name == "constant":
        yield (
            f"schedule.min_ratio={show(schedule.min_ratio)} has no effect on constant, and no "
            "setting is ignored. Remove min_ratio, or use name: cosine or wsd."
        )
    if schedule.name == "wsd" and not schedule.decay_steps:
        yield (
            "schedule.name=wsd decays in its last steps, and schedule.decay_steps=0. "
            f"Give decay_steps, such as {max(1, steps // 10)}, or use name: constant."
        )
    phases = schedule.warmup_steps + (schedule.decay_steps if schedule.name == "wsd" else 0)
    if phases > steps:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} and decay_steps="
            f"{schedule.decay_steps} are more than train.steps={steps}. Use fewer of them, or more "
            "steps."
        )


def check_problems(train: TrainSection) -> Iterator[str]:
    """Yield a check that would never be made."""
    if train.check_every > train.steps:
        yield (
            f"train.check_every={train.check_every} is more than train.steps={train.steps}, so "
            f"that no step would be checked. Use check_every={train.steps} or less, or 0 for none."
        )


def metrics_problems(metrics: MetricsSection) -> Iterator[str]:
    """Yield what is set and would not be used."""
    if metrics.wandb is None and metrics.wandb_mode != "online":
        yield (
            f"metrics.wandb_mode={metrics.wandb_mode} has no effect without metrics.wandb, and no "
            "setting is ignored. Give wandb the name of a project, or remove wandb_mode."
        )


def profile_problems(
    profile: ProfileSection, train: TrainSection, world_size: int
) -> Iterator[str]:
    """Yield steps that will not be made, ranks that are not there, and what would not be used."""
    first = profile.first_step
    if first is None:
        for key in ("steps", "ranks"):
            value = getattr(profile, key)
            if value != type(profile).model_fields[key].default:
                yield (
                    f"profile.{key}={show(value)} has no effect without profile.first_step, and no "
                    f"setting is ignored. Give first_step, such as 10, or remove {key}."
                )
        return
    last = first + profile.steps - 1
    if last > train.steps:
        yield (
            f"profile.first_step={first} and steps={profile.steps} end with step {last}, and "
            f"train.steps={train.steps}. Use first_step={max(1, train.steps - profile.steps + 1)} "
            f"and steps={min(profile.steps, train.steps)}, or more train.steps."
        )
    if profile.ranks is not None:
        wrong = [rank for rank in profile.ranks if rank >= world_size]
        if wrong or not profile.ranks:
            yield (
                f"profile.ranks={show(profile.ranks)}: the mesh has ranks 0 to {world_size - 1}. "
                "Name some of them, or use null for all."
            )
