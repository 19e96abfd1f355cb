"""What sections of a config are made of: keys with a type, a default and a meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

Dtype = Literal["float64", "float32", "bfloat16"]
Part = Literal["compute", "float32"]  # a part of the model: as the rest, or in float32
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def key(default: T, meaning: str, *, expects: str, example: str, words: str = "") -> T:
    """Declare a key for messages and for the page that ``paralign init`` writes.

    Args:
        default: Its value when the config does not give it.
        meaning: What it does, in a few words.
        expects: Completes the sentence "it must be ...".
        example: A value that works, as YAML.
        words: Those texts it may be, one of which may have been meant.
    """
    extra: dict[str, Any] = {"expects": expects, "example": example, "words": words}
    field: T = Field(default, description=meaning, json_schema_extra=extra)
    return field


def count(default: int, meaning: str, *, example: str = "2") -> int:
    """Declare a number of things."""
    return key(default, meaning, expects="a whole number of at least 1", example=example)


def natural(default: int, meaning: str, example: str) -> int:
    """Declare a number that may be 0."""
    return key(default, meaning, expects="a whole number of at least 0", example=example)


def dtype(default: Dtype, meaning: str) -> Dtype:
    """Declare a dtype."""
    names = "float64, float32, bfloat16"
    return key(default, meaning, expects=f"one of {names}", example=str(default), words=names)


def part(meaning: str) -> Part:
    """Declare the dtype of a part of the model."""
    return key(
        "compute",
        f"{meaning}: as compute, or in float32",
        expects="compute or float32",
        example="compute",
        words="compute, float32",
    )


def tuples(value: Any) -> Any:
    """Turn YAML's lists, and lists in them, into tuples, which a frozen section can hold."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


class Section(BaseModel):
    """A part of the config: frozen, strictly typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
