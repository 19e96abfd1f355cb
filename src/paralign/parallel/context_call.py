"""Find q, k, v, the mask and the causal flag in a call of an attention core, and replace them.

A core is any module whose ``forward`` takes q, k and v. Python's own signature binding decides
which argument is which, so a flag counts whether it was passed, by position or by name, or left at
its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paralign.errors import LayoutError

MASK_NAMES = ("mask", "attn_mask", "attention_mask")
CAUSAL_NAMES = ("is_causal", "causal")
DROPOUT_NAMES = ("dropout_p", "dropout")
QKV = ("q", "k", "v")

Key = int | str  # place in the positional arguments, or keyword


class CoreSignature:
    """What a core's ``forward`` calls its arguments.

    Args:
        forward: The core's own forward.
        core: The core's class name, for messages.
        qkv_indices: Places of q, k and v among the parameters of ``forward``.
        qkv_kwarg_names: Names of q, k and v, instead of places; empty: use the places.
        mask_kwarg_name: Name of the mask; None: the one that ``forward`` has among
            :data:`MASK_NAMES`, if any.

    Raises:
        LayoutError: Not three places or names, a name ``forward`` does not have, or two parameters
            that could be the mask.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        core: str,
        qkv_indices: Sequence[int],
        qkv_kwarg_names: Sequence[str],
        mask_kwarg_name: str | None,
    ) -> None:
        parameters = inspect.signature(forward).parameters.values()
        self.core = core
        self.positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        named = [p for p in parameters if p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
        self.names = [p.name for p in named]
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.qkv_by = "qkv_kwarg_names" if qkv_kwarg_names else "qkv_indices"
        self.qkv: tuple[Key, ...] = tuple(qkv_kwarg_names or qkv_indices)
        self._check_qkv()
        self.mask_name = self._find_mask(mask_kwarg_name)
        self.causal_name = next((name for name in CAUSAL_NAMES if name in self.names), None)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CoreCall:
        """Say which argument of one call is which.

        Raises:
            LayoutError: q, k or v is missing from the call or is no tensor.
        """
        keys = [self._locate(key, args, kwargs) for key in self.qkv]
        missing = [
            f"{what} ({self.qkv_by} says {key!r})"
            for what, key, found in zip(QKV, self.qkv, keys, strict=True)
            if found is None or not isinstance(_get(found, args, kwargs), Tensor)
        ]
        if missing:
            kinds = ", ".join(type(arg).__name__ for arg in args)
            raise LayoutError(
                f"the call of {self.core} has no tensor for {', '.join(missing)}: it has "
                f"positional arguments ({kinds}) and keywords {sorted(kwargs)}, for "
                f"forward({', '.join(self.names)}). Set qkv_indices to the places of q, k and v, "
                "or qkv_kwarg_names to their names."
            )
        return CoreCall(
            args=args,
            kwargs=dict(kwargs),
            qkv_keys=tuple(key for key in keys if key is not None),
            mask_key=self._locate_or_name(self.mask_name, args, kwargs),
            causal_key=self._causal_key(args, kwargs),
            signature=self,
        )

    def _causal_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        if self.causal_name is not None:
            return self._locate_or_name(self.causal_name, args, kwargs)
        return next((name for name in CAUSAL_NAMES if name in kwargs), None)

    def _locate_or_name(
        self, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Key | None:
        found = self._locate(name, args, kwargs)
        return name if found is None else found

    def _locate(self, key: Key | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """Return where a place or name is in the call; None: it was not passed."""
        if isinstance(key, int):
            if key < len(args):
                return key
            key = self.positional[key] if key < len(self.positional) else None
        if key is None or key in kwargs:
            return key
        index = self.positional.index(key) if key in self.positional else len(args)
        return index if index < len(args) else None

    def _check_qkv(self) -> None:
        value = tuple(self.qkv)
        if len(value) != len(QKV) or len(set(value)) != len(QKV):
            raise LayoutError(
                f"{self.qkv_by}={value!r} must be three different entries, for q, k and v of "
                f"{self.core}.forward({', '.join(self.names)})."
            )
        if self.qkv_by == "qkv_kwarg_names":
            unknown = [n for n in value if n not in self.names and not self.takes_any_keyword]
        else:
            unknown = [
                i
                for i in value
                if not isinstance(i, int)
                or i < 0
                or (i >= len(self.positional) and not self.takes_any_position)
            ]
        if unknown:
            raise LayoutError(
                f"{self.qkv_by}={value!r} names {', '.join(map(repr, unknown))}, which "
                f"{self.core}.forward({', '.join(self.names)}) does not have."
            )

    def _find_mask(self, given: str | None) -> str | None:
        if given is not None:
            if given not in self.names and not self.takes_any_keyword:
                raise LayoutError(
                    f"mask_kwarg_name={given!r} is no parameter of "
                    f"{self.core}.forward({', '.join(self.names)}). Name the parameter that takes "
                    "the attention mask."
                )
            return given
        found = [name for name in MASK_NAMES if name in self.names]
        if len(found) > 1:
            raise LayoutError(
                f"{self.core}.forward has {' and '.join(found)}: set mask_kwarg_name to the one "
                "that takes the attention mask."
            )
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class CoreCall:
    """One call of a core, with its arguments found."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    qkv_keys: tuple[Key, ...]
    mask_key: Key | None  # None: the core takes no mask
    causal_key: Key | None  # None: the core takes no causal flag
    signature: CoreSignature

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that attention works on."""
        q, k, v = (_get(key, self.args, self.kwargs) for key in self.qkv_keys)
        return q, k, v

    @property
    def mask(self) -> Any:
        """The mask that was passed; None: none was."""
        return self._value(self.mask_key, self.signature.mask_name)

    @property
    def is_causal(self) -> bool:
        """Whether the core is asked to be causal, by the call or by its default."""
        return bool(self._value(self.causal_key, self.signature.causal_name))

    @property
    def dropout(self) -> dict[str, float]:
        """Dropout arguments that are not zero."""
        values = self.named_values()
        found = {name: values[name] for name in DROPOUT_NAMES if name in values}
        return {name: p for name, p in found.items() if isinstance(p, int | float) and p}

    @property
    def other_tensors(self) -> dict[str, Tensor]:
        """Tensors with more than one element that are not q, k, v or the mask."""
        known = {id(_get(key, self.args, self.kwargs)) for key in self.qkv_keys} | {id(self.mask)}
        return {
            name: value
            for name, value in self.named_values().items()
            if isinstance(value, Tensor) and id(value) not in known and value.numel() > 1
        }

    def named_values(self) -> dict[str, Any]:
        """Return every argument by name, defaults included."""
        names = self.signature.positional
        passed = {
            names[i] if i < len(names) else f"argument {i}": arg for i, arg in enumerate(self.args)
        }
        return {**self.signature.defaults, **passed, **self.kwargs}

    def replaced(
        self, qkv: Sequence[Tensor], *, mask: Any = None, is_causal: bool | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors; mask None and flag None stay as they were."""
        args, kwargs = list(self.args), dict(self.kwargs)
        changes: list[tuple[Key | None, Any]] = list(zip(self.qkv_keys, qkv, strict=True))
        if mask is not None:
            changes.append((self.mask_key, mask))
        if is_causal is not None and self.causal_key is not None:
            changes.append((self.causal_key, is_causal))
        for key, value in changes:
            if isinstance(key, int):
                args[key] = value
            elif key is not None:
                kwargs[key] = value
        return tuple(args), kwargs

    def _value(self, key: Key | None, name: str | None) -> Any:
        if key is None:
            return None
        if isinstance(key, int) or key in self.kwargs:
            return _get(key, self.args, self.kwargs)
        return self.signature.defaults.get(name or "")


def _get(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[key] if isinstance(key, int) else kwargs[key]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
