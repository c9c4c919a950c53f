"""A held-out data set as batches: the same ones at every evaluation, shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chimera_train.loss import IGNORE_INDEX

from .dataset import DATASET_FILE, TokenDataset
from .errors import DataError


class HeldOut:
    """Windows as in training: every token but the first of the data set is a label once, in the last window too, which
    is filled up with labels that do not count."""

    def __init__(self, folder: Path, *, key: str, sequence_length: int, max_samples: int | None, tokenizer_sha256: str):
        """Open and check. `key`: what the recipe calls it. Raises DataError if the folder is damaged, too small, or
        made by another tokenizer than the training data: perplexities would not compare."""
        self.dataset = TokenDataset(folder)
        if self.dataset.info.tokenizer.sha256 != tokenizer_sha256:
            raise DataError(
                f"{key}: the tokenizer of {folder / DATASET_FILE} is not the training data's",
                "prepare both with one tokenizer, or both at once: `chimera_sm data prepare --held-out PERCENT`",
            )
        if self.dataset.num_tokens < 2:
            raise DataError(f"{key}: {folder / DATASET_FILE} holds no two tokens, so nothing to predict")
        self.sequence_length = sequence_length
        num_windows = math.ceil((self.dataset.num_tokens - 1) / sequence_length)
        self.num_samples = min(num_windows, max_samples or num_windows)
        self._num_windows = num_windows

    def num_batches(self, batch_size: int, num_ranks: int) -> int:
        """Batches of every rank."""
        return math.ceil(self.num_samples / (batch_size * num_ranks))

    def batches(self, batch_size: int, rank: int, num_ranks: int) -> Iterator[np.ndarray]:
        """One rank's batches, int64 [batch_size, sequence_length + 1]: `num_batches` of them, on all ranks alike.
        Rows beyond the samples have no label that counts."""
        for number in range(self.num_batches(batch_size, num_ranks)):
            first = (number * num_ranks + rank) * batch_size
            yield np.stack([self._row(index) for index in range(first, first + batch_size)])

    def _row(self, index: int) -> np.ndarray:
        row = np.full(self.sequence_length + 1, IGNORE_INDEX, dtype=np.int64)
        if index < self.num_samples:
            start = index * self._num_windows // self.num_samples * self.sequence_length
            tokens, _ = self.dataset.read(start, min(start + len(row), self.dataset.num_tokens))
            row[: len(tokens)] = tokens
        return row
