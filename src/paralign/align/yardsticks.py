"""Choose what a run is held against: multiples of eps, a truth, a second reference, a table."""

from __future__ import annotations

from paralign.align.budget import EPS, Budget, Yardstick
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError


def budget_for(
    parallel: TraceReader, truth: TraceReader | None, noise: TraceReader | None
) -> Budget:
    """Return the budget of a comparison.

    Args:
        parallel: The run under test.
        truth: An fp64 run of the reference, or None.
        noise: A second run of the reference in the run's own dtype, or None.

    Raises:
        ConfigError: The run's dtype is not known, or what is given does not fit it.
    """
    dtype = str(parallel.facts.run.get("compute_dtype"))
    if dtype not in EPS:
        raise ConfigError(
            f"{parallel.directory}: compute_dtype={dtype!r} is not one of {', '.join(EPS)}. "
            "Name it with pa.record(..., facts={'compute_dtype': ...})."
        )
    if truth is not None and noise is not None:
        raise ConfigError(
            f"truth={str(truth.directory)!r} and noise={str(noise.directory)!r} are two ways to "
            "measure the same. Give one of them; the truth is the sharper one."
        )
    if noise is not None:
        return _noise_budget(dtype, noise)
    if truth is None:
        fixed = dtype == "float64"
        return Budget(dtype, Yardstick.FP64 if fixed else Yardstick.UNCALIBRATED)
    if dtype == "float64":
        raise ConfigError(
            f"truth={str(truth.directory)!r} is for runs in fp32 or bf16; this one is in fp64, "
            "where the reference is exact enough. Leave truth out."
        )
    if truth.facts.run.get("compute_dtype") != "float64":
        raise ConfigError(
            f"truth={str(truth.directory)!r} was computed in "
            f"{truth.facts.run.get('compute_dtype')}. Record the reference run in float64 for it."
        )
    return Budget(dtype, Yardstick.TRUTH)


def _noise_budget(dtype: str, noise: TraceReader) -> Budget:
    if dtype == "float64":
        raise ConfigError(
            f"noise={str(noise.directory)!r} is for runs in fp32 or bf16; this one is in fp64, "
            "where the budget is fixed. Leave noise out."
        )
    if (other := noise.facts.run.get("compute_dtype")) != dtype:
        raise ConfigError(
            f"noise={str(noise.directory)!r} was computed in {other}, the run under test in "
            f"{dtype}. Record the second reference run in {dtype}."
        )
    return Budget(dtype, Yardstick.NOISE)
