"""Reads a `config.json` of the `transformers` library, key by key, with nothing passed over.

A key is taken over as a size, must have the one value that our models compute, or is known to say
nothing about what is computed. Any other key is refused: it may change the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paralign.models.rules import is_number

OWN = "paralign"
"""The key under which an export keeps what only training asks for."""

NOTHING = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id
    ep_size id2label is_encoder_decoder label2id max_position_embeddings
    model_type output_attentions output_hidden_states output_router_logits pad_token_id
    pretraining_tp problem_type return_dict router_aux_loss_coef seq_aux aux_loss_alpha
    tokenizer_class torch_dtype transformers_version use_cache attn_implementation
    num_nextn_predict_layers num_mtp_layers sep_token_id torchscript num_labels
    """.split()
)
"""Keys that do not change what a forward computes. Layers that predict further tokens come after
the model; if files have them, they are refused by name."""


@dataclass
class ConfigReader:
    """The entries of one ``config.json``, and what is wrong with them.

    Args:
        raw: The file.
    """

    raw: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number; 0, and a problem, where it is missing or something else."""
        self._seen.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.problems.append(
            f"{key} is missing" if value is None else f"{key}={value!r} must be a whole number"
        )
        return 0

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        self._seen.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if is_number(value):
            return float(value)
        self.problems.append(f"{key}={value!r} must be a number")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        self._seen.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        self.problems.append(f"{key}={value!r} must be true or false")
        return default

    def only(self, key: str, *values: Any, why: str) -> None:
        """Refuse another value than these; the first one is the default."""
        self._seen.add(key)
        value = self.raw.get(key, values[0])
        if value not in values:
            self.problems.append(f"{key}={value!r}: {why}")

    def rope_theta(self, default: float) -> float:
        """Return the base of the rotary frequencies, from wherever this version keeps it."""
        theta = self.number("rope_theta", default)
        self._seen |= {"rope_scaling", "rope_parameters"}
        for key in ("rope_scaling", "rope_parameters"):
            said = self.raw.get(key) or {}
            if not isinstance(said, Mapping):
                self.problems.append(f"{key}={said!r} must be a mapping")
                continue
            kind = said.get("rope_type", said.get("type", "default"))
            others = sorted(set(said) - {"rope_type", "type", "rope_theta"})
            if kind != "default":
                self.problems.append(
                    f"{key} has rope_type={kind!r}: paralign turns by plain frequencies, which are "
                    "called default"
                )
            elif others:
                self.problems.append(f"{key} has {', '.join(others)}, which paralign has not")
            if is_number(said.get("rope_theta")):
                theta = float(said["rope_theta"])
        return theta

    def own(self, key: str, default: Any) -> Any:
        """Return what an export of ours has kept about training."""
        self._seen.add(OWN)
        kept = self.raw.get(OWN)
        return kept.get(key, default) if isinstance(kept, Mapping) else default

    def finish(self) -> list[str]:
        """Return the problems, with every key that nobody has asked for."""
        self._seen.add(OWN)
        if quantized := self.raw.get("quantization_config"):
            kind = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            self.problems.append(
                f"quantization_config={kind!r}: the weights are quantised. Save the model in "
                "bfloat16 or float32 first"
            )
        given = {key for key, value in self.raw.items() if value is not None}
        left = sorted(given - self._seen - NOTHING - {"quantization_config"})
        self.problems += [
            f"{key}={self.raw[key]!r} is not known, and it may change what is computed. Remove it "
            "from config.json if it does not"
            for key in left
        ]
        return self.problems
