"""Batches for one data-parallel rank, in an order that depends on the seed alone.

The documents of the data set stand one after the other, each ended by the end-of-document token, and are cut into
windows of `sequence_length + 1` tokens with a stride of `sequence_length`: the last token of a window is only a label
there, and the first input of the next. Windows cross documents and shards; the tail that fills no window is left out.

Every sample of a run has a position 0, 1, 2, … Position q is sample `permutation_e(q mod n)` of epoch e = q div n, with
n samples an epoch and a permutation keyed by (seed, e). Step s takes the positions [s · B, (s + 1) · B) for a global
batch of B, across the ends of epochs, and rank r of R takes the r-th of R equal parts of them. So the global batch is
the same set for every world size, micro-batch size and accumulation; the whole state is one count; and any position is
found in O(1).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chimera_train.config import DataConfig, TrainConfig
from chimera_train.config.lasting import DATA_PLACE

from .dataset import DATASET_FILE, TokenDataset
from .errors import DataError
from .order import Permutation, derive_seed
from .prefetch import Prefetcher

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Where a row of a batch came from."""

    source_id: int
    """Number of the data set; 0 where there is one."""
    document_ids: tuple[int, ...]
    """Documents that the window touches, counted over all shards of the data set."""
    global_index: int
    """Number of the window in the data set, over all shards: the same number is the same tokens in every epoch."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one optimizer step."""

    micro_batches: list[np.ndarray]
    """Accumulation steps × int64 [micro_batch_size, sequence_length + 1]; inputs are [:, :-1], labels [:, 1:]."""
    samples: list[Sample]
    """One a row, in the order of the micro-batches."""
    wait_s: float
    """Seconds that the caller stood still for this step's data."""

    @property
    def source_ids(self) -> np.ndarray:
        """Int64 [rows of all micro-batches]."""
        return np.array([sample.source_id for sample in self.samples], dtype=np.int64)


MicroBatch = tuple[np.ndarray, list[Sample]]


class Loader:
    """Deterministic, resumable batches out of a folder of shards. Not thread-safe: one consumer."""

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        *,
        folder: Path,
        data_rank: int,
        data_parallel_size: int,
        accumulation_steps: int,
        vocab_size: int,
    ):
        """Open `folder` (see `TokenDataset` for what is checked). Raises DataError if it is damaged, too small for one
        sample, or made by a tokenizer with more ids than the model's `vocab_size`."""
        self._data, self._train = data, train
        self._rank, self._num_ranks = data_rank, data_parallel_size
        self._accumulation = accumulation_steps
        assert train.micro_batch_size * accumulation_steps * data_parallel_size == train.global_batch_size
        self.dataset = TokenDataset(folder)
        info = self.dataset.info
        if info.vocab_size > vocab_size:
            raise DataError(
                f"{folder / DATASET_FILE}: the tokenizer of these shards has {info.vocab_size} ids, the model "
                f"model.vocab_size={vocab_size}: the tokenizer does not match the model",
                f"set model.vocab_size={info.vocab_size} or more, or prepare the data with the model's tokenizer",
            )
        self.source_names = (data.name,)
        """By `Sample.source_id`."""
        self.num_samples = (info.num_tokens - 1) // train.sequence_length
        """Samples an epoch."""
        if self.num_samples < 1:
            raise DataError(
                f"{folder / DATASET_FILE}: {info.num_tokens} tokens do not fill one sample of "
                f"train.sequence_length={train.sequence_length} (+ 1 label)",
                "use more text or a shorter sequence",
            )
        if self.num_samples < train.global_batch_size and data_rank == 0:
            _LOG.warning(
                "%s holds %d samples, fewer than train.global_batch_size=%d: every step repeats some of them",
                folder,
                self.num_samples,
                train.global_batch_size,
            )
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: Permutation(self.num_samples, derive_seed(train.seed, epoch))
        )
        self._consumed = 0
        self._prefetcher: Prefetcher[MicroBatch] | None = None
        self._produce: Iterator[MicroBatch] | None = None
        self._closed = False

    def next_step(self) -> StepBatch:
        """The batch of the next step. Raises what the reading thread met, with its traceback."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        started = time.perf_counter()
        if self._produce is None:
            self._produce = self._micro_batches(self._consumed)
            if self._data.prefetch_batches:
                self._prefetcher = Prefetcher(self._produce, self._data.prefetch_batches)
        take = self._prefetcher.get if self._prefetcher else self._produce.__next__
        try:
            pieces = [take() for _ in range(self._accumulation)]
        except BaseException:
            self._stop()  # a half-taken step is not consumed: the next call begins it again
            raise
        self._consumed += self._train.global_batch_size
        return StepBatch(
            micro_batches=[tokens for tokens, _ in pieces],
            samples=[sample for _, samples in pieces for sample in samples],
            wait_s=time.perf_counter() - started,
        )

    def state_dict(self) -> dict[str, int]:
        """`samples_consumed`: samples that all ranks together were given by `next_step`, over all epochs; what is read
        ahead does not count. The rest says what the count is a count of, and must be equal at resume."""
        return {"samples_consumed": self._consumed, **self._meaning()}

    def _meaning(self) -> dict[str, int]:
        sections = {"train": self._train, "data": self._data}
        values = {}
        for name, key in DATA_PLACE.items():
            section, _, field = key.partition(".")
            values[name] = int(getattr(sections[section], field))
        return {"dataset": self.dataset.identity, **values}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after `samples_consumed`, at any world size, micro-batch size and global batch size.

        Raises DataError if the data set, seed, sequence length or shuffling is another one: the count would point
        elsewhere, and samples would be repeated or lost in silence.
        """
        names = {"dataset": f"the content of {self.dataset.folder}", **DATA_PLACE}
        for key, value in self._meaning().items():
            if state.get(key, value) != value:
                raise DataError(
                    f"{names[key]} has changed since this run was saved ({state[key]}, now {value}): "
                    "its place in the data would be lost",
                    "put the old one back, or start a new run",
                )
        self._stop()
        self._consumed = state["samples_consumed"]

    def close(self) -> None:
        """Stop the reading thread. Safe to call twice."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._prefetcher = self._produce = None

    def _micro_batches(self, consumed: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches from a global count on, without end."""
        train = self._train
        share = train.global_batch_size // self._num_ranks
        while True:
            start = consumed + self._rank * share
            for position in range(start, start + share, train.micro_batch_size):
                indices = self._sample_indices(position, train.micro_batch_size)
                tokens = np.empty((train.micro_batch_size, train.sequence_length + 1), dtype=np.int64)
                samples = []
                for row, index in enumerate(indices.tolist()):
                    first = index * train.sequence_length
                    tokens[row], documents = self.dataset.read(first, first + train.sequence_length + 1)
                    samples.append(Sample(source_id=0, document_ids=documents, global_index=index))
                yield tokens, samples
            consumed += train.global_batch_size

    def _sample_indices(self, position: int, count: int) -> np.ndarray:
        """Numbers of the samples at positions [position, position + count), int64 [count]."""
        positions = np.arange(position, position + count, dtype=np.int64)
        within = positions % self.num_samples
        if not self._data.shuffle:
            return within
        epochs = positions // self.num_samples
        indices = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            indices[chosen] = self._permutation(epoch)(within[chosen])
        return indices
