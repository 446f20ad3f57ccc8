"""Real text without a download: the source of Python's standard library, and a tokenizer trained on it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "lib2to3"}


def load_text(max_bytes: int = 2_000_000) -> str:
    """Library sources in the order of their paths, one after another, cut after `max_bytes` of UTF-8."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    pieces: list[bytes] = []
    missing = max_bytes
    for path in sorted(path for path in paths if _SKIPPED.isdisjoint(path.parts)):
        if missing <= 0:
            break
        pieces.append((stdlib / path).read_bytes()[:missing])
        missing -= len(pieces[-1])
    return b"".join(pieces).decode("utf-8", errors="ignore")  # the cut may fall inside a character


class Tokenizer:
    """Byte pairs, learned from a text line by line: text to token ids and back, without loss for any text."""

    def __init__(self, text: str, vocab_size: int = 2048) -> None:
        self._bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        self._bpe.train_from_iterator(text.splitlines(keepends=True), trainer)

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> torch.Tensor:
        """int64 [number of tokens]"""
        lines = self._bpe.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([token for line in lines for token in line.ids], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        return self._bpe.decode(tokens.tolist())


def batches(
    tokens: torch.Tensor, batch: int, context: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows without end: inputs and targets, both int64 [batch, context], targets one token later.

    The same seed gives the same windows in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    windows = tokens.unfold(0, context + 1, 1)
    while True:
        window = windows[torch.randint(len(windows), (batch,), generator=generator)]
        yield window[:, :-1], window[:, 1:]
