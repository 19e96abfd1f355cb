"""Small texts and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


def write_documents(folder: Path, *lengths: int) -> Path:
    """Write one file a length, of bytes that say where they are: 0, 1, 2, ... over all files."""
    folder.mkdir(parents=True, exist_ok=True)
    at = 0
    for number, length in enumerate(lengths):
        (folder / f"{number:03}").write_bytes(bytes((at + n) % 251 for n in range(length)))
        at += length
    return folder


def write_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """Train a byte-level BPE on a few words and write it as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path))
    return path
