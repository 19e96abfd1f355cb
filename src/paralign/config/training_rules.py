"""Rules of the sections that say how parameters move, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.parse import show
from paralign.config.training import OptimizerSection, ScheduleSection, TrainSection


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
