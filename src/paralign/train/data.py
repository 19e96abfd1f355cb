"""Opens what a config says to train and to validate on, the same for every rank."""

from __future__ import annotations

from pathlib import Path

from paralign.config.run import RunConfig
from paralign.data.corpus import find_corpus
from paralign.data.order import Shuffled, Strides
from paralign.data.rows import ByteRows, Rows, split_rows
from paralign.data.source import HeldOut, TokenSource
from paralign.data.token_build import Report, prepare_tokens
from paralign.data.token_file import TokenFile
from paralign.data.token_rows import DocumentRows, PackedRows
from paralign.data.tokenizer import BYTES, open_tokenizer


def needs_token_file(config: RunConfig) -> bool:
    """Whether tokens are read from a file of their own, and not from the text."""
    return config.data.tokenizer != BYTES or config.data.packing != "none"


def prepare_data(config: RunConfig, *, report: Report | None = None, verify: bool = True) -> None:
    """Make the token files of a run where they are missing or old.

    Call it once before ranks start: they find the files ready. A rank that does not makes them
    itself, or waits for another process that does.

    Args:
        config: The run.
        report: Told how many bytes of how many have been read.
        verify: Read what is there once, to find damage that sizes do not show.

    Raises:
        DataError: See :func:`paralign.data.token_build.prepare_tokens`.
    """
    if not needs_token_file(config):
        return
    for key, source in _sources(config).items():
        _token_file(config, source, key, report=report, verify=verify)


def open_source(config: RunConfig) -> TokenSource:
    """Return the batches to train on; what is held out is not among them.

    Raises:
        DataError: A source is missing, unreadable, too short or has changed, or a token file is
            damaged.
    """
    rows = _rows(config, config.data.source, "data.source")
    if _holds_out(config):
        rows, _ = split_rows(rows, config.validation.share)
    seed = config.align.seed
    kind = Shuffled if needs_token_file(config) else Strides
    return TokenSource(
        rows,
        global_batch=config.batch.global_batch,
        seed=seed,
        padding=config.data.padding,
        order=kind(rows.num_rows, seed=seed),
    )


def open_held_out(config: RunConfig) -> HeldOut | None:
    """Return the batches to validate on; None: there is to be no validation.

    Raises:
        DataError: As :func:`open_source`.
    """
    section = config.validation
    if not section.every:
        return None
    if section.source is not None:
        rows = _rows(config, section.source, "validation.source")
    else:
        _, rows = split_rows(_rows(config, config.data.source, "data.source"), section.share)
    return HeldOut(rows, global_batch=config.batch.global_batch, most=section.batches)


def _holds_out(config: RunConfig) -> bool:
    return config.validation.every > 0 and config.validation.source is None


def _sources(config: RunConfig) -> dict[str, str]:
    sources = {"data.source": config.data.source}
    if config.validation.every and config.validation.source is not None:
        sources["validation.source"] = config.validation.source
    return sources


def _rows(config: RunConfig, source: str, key: str) -> Rows:
    seq_len = config.batch.seq_len
    if not needs_token_file(config):
        return ByteRows(find_corpus(source, key=key), seq_len=seq_len)
    file = _token_file(config, source, key)
    if config.data.packing == "none":
        return DocumentRows(file, seq_len=seq_len)
    return PackedRows(file, seq_len=seq_len, isolate=config.data.packing == "isolated")


def _token_file(
    config: RunConfig,
    source: str,
    key: str,
    *,
    report: Report | None = None,
    verify: bool = False,
) -> TokenFile:
    return prepare_tokens(
        find_corpus(source, key=key),
        open_tokenizer(config.data.tokenizer, config.data.end_token),
        Path(config.data.token_dir).expanduser(),
        report=report,
        verify=verify,
    )
