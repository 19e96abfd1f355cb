"""Rules of the sections that say where tokens come from and what is held out."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.run import DataSection, RunConfig
from paralign.config.training import ValidationSection
from paralign.data.corpus import find_corpus
from paralign.data.tokenizer import BYTES, open_tokenizer
from paralign.errors import DataError


def tokenizer_problems(data: DataSection, vocab_size: int | None) -> Iterator[str]:
    """Yield why tokens cannot be made, or not be fed to a model with ``vocab_size`` embeddings."""
    if data.tokenizer == BYTES and data.end_token is not None:
        yield (
            f"data.end_token={data.end_token!r} has no effect on data.tokenizer=bytes, which has "
            "no token besides the 256 bytes. Remove end_token, or give the path of a tokenizer."
        )
        return
    try:
        tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    except DataError as error:
        yield str(error)
        return
    needed = tokenizer.vocab_size
    if vocab_size is not None and 0 < vocab_size < needed:
        yield (
            f"model.vocab_size={vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer={data.tokenizer}. Use vocab_size={needed} or more."
        )


def packing_problems(config: RunConfig) -> Iterator[str]:
    """Yield why documents cannot be packed."""
    if config.data.packing != "none" and config.batch.seq_len < 2:
        yield (
            f"batch.seq_len={config.batch.seq_len} is too short for data.packing="
            f"{config.data.packing}: a row may have nothing to predict. Use seq_len=2 or more, or "
            "packing: none."
        )


def validation_problems(validation: ValidationSection) -> Iterator[str]:
    """Yield what would not be used, and why there is nothing to validate on."""
    given = [
        f"validation.{key}={getattr(validation, key)}"
        for key in ("source", "share", "batches")
        if getattr(validation, key) != ValidationSection.model_fields[key].default
    ]
    if not validation.every:
        if given:
            yield (
                f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect without "
                "validation.every, and no setting is ignored. Give every, such as 100, or remove "
                "the section."
            )
        return
    default = ValidationSection.model_fields["share"].default
    if validation.source is not None:
        if validation.share != default:
            yield (
                f"validation.share={validation.share} has no effect beside validation.source, and "
                "no setting is ignored. Remove one of them."
            )
        try:
            find_corpus(validation.source, key="validation.source")
        except DataError as error:
            yield str(error)
    elif not validation.share:
        yield (
            f"validation.every={validation.every} has nothing to validate on: validation.share=0. "
            "Use a share such as 0.05, or give validation.source."
        )
