"""A folder of shards with its `dataset.json`, read as one long row of tokens.

`dataset.json` is the identity of a data set: which shards there are, in which order, how long, with which checksums,
and which tokenizer made them. It is written last, so a folder without one is not finished.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from chimera_train.config.decode import ConfigError, decode, encode, sha256_of

from .errors import DataError
from .indexed import IndexedShard, ShardInfo, TokenDtype, bin_path, idx_path

DATASET_FILE = "dataset.json"
TOKENIZER_FILE = "tokenizer.json"
SCHEMA_VERSION = 1
_OPEN_SHARDS = 256
"""Shards mapped at a time: a map holds a file descriptor, and processes have 1,024 by default."""


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    file: str
    """In the folder of `dataset.json`."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The content of `dataset.json`."""

    schema_version: int
    shards: tuple[ShardInfo, ...]
    """In the order of the corpus."""
    num_documents: int
    num_tokens: int
    vocab_size: int
    """Largest id of the tokenizer + 1."""
    dtype: TokenDtype
    eod_id: int
    """Last token of every document."""
    tokenizer: TokenizerInfo
    source: dict[str, Any]
    """Where the text came from; for people."""


def write_json(path: Path, value: Any) -> None:
    """Write and rename, so that the file is there whole or not at all. The same value gives the same bytes."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(encode(value), file, indent=2, sort_keys=True, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_info(folder: Path) -> DatasetInfo:
    """Read and decode `dataset.json`, or raise DataError."""
    path = folder / DATASET_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: {'the folder holds no finished data set' if folder.is_dir() else 'no such folder'}",
            "make it with `python -m chimera_sm data prepare`, or correct data.path or data.uri",
        ) from None
    try:
        info = decode(DatasetInfo, json.loads(text))
    except (ValueError, ConfigError) as error:
        raise DataError(f"{path} is damaged: {str(error).splitlines()[0]}", "prepare the data again") from error
    if info.schema_version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {info.schema_version}; this loader knows {SCHEMA_VERSION}",
            "prepare the data again",
        )
    if not info.shards:
        raise DataError(f"{path} names no shard: the data set is empty", "prepare the data again")
    return info


class TokenDataset:
    """All documents of a data set, one after the other. Token offsets and document numbers count over all shards."""

    def __init__(self, folder: Path, *, verify_checksums: bool = False):
        """Open and check: every shard is there, whole, and the one `dataset.json` means. `verify_checksums` reads
        every byte as well. Raises DataError."""
        self.folder = folder
        self.info = read_info(folder)
        self._check_tokenizer()
        self._token_ends = list(accumulate(shard.num_tokens for shard in self.info.shards))
        self._document_ends = list(accumulate(shard.num_documents for shard in self.info.shards))
        if (self.num_tokens, self._document_ends[-1]) != (self.info.num_tokens, self.info.num_documents):
            raise DataError(f"{folder / DATASET_FILE} is damaged: its totals are not the sums over its shards")
        for number in range(len(self.info.shards)):
            self._check_shard(number, verify_checksums)
        self._shard = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open)

    @property
    def num_tokens(self) -> int:
        return self._token_ends[-1]

    @functools.cached_property
    def identity(self) -> int:
        """63 bits over the content: equal for equal tokens, wherever and out of whatever files they were prepared."""
        shards = [(shard.bin_sha256, shard.idx_sha256) for shard in self.info.shards]
        return int(sha256_of([shards, self.info.tokenizer.sha256])[:16], 16) >> 1

    def _open(self, number: int) -> IndexedShard:
        return IndexedShard(self.folder / self.info.shards[number].prefix)

    def _check_shard(self, number: int, verify_checksums: bool) -> None:
        expected = self.info.shards[number]
        shard = self._open(number)
        shard.check_index()
        for what, found, wanted in (
            ("documents", shard.num_documents, expected.num_documents),
            ("tokens", shard.num_tokens, expected.num_tokens),
            ("tokens of type", shard.dtype.name, self.info.dtype),
        ):
            if found != wanted:
                raise DataError(
                    f"{shard.idx_path}: {what} {found} where {DATASET_FILE} says {wanted}",
                    "the shard is not the one that was prepared: copy the data set again",
                )
        if verify_checksums:
            prefix = self.folder / expected.prefix
            for path, digest in ((bin_path(prefix), expected.bin_sha256), (idx_path(prefix), expected.idx_sha256)):
                if file_sha256(path) != digest:
                    raise DataError(f"{path} is damaged: its SHA-256 is not the one in {DATASET_FILE}", "copy it again")

    def _check_tokenizer(self) -> None:
        path = self.folder / self.info.tokenizer.file
        if not path.is_file():
            raise DataError(f"{path} is missing", "copy the tokenizer that made the shards beside them")
        if file_sha256(path) != self.info.tokenizer.sha256:
            raise DataError(
                f"{path} is not the tokenizer that made the shards: its SHA-256 is not the one in {DATASET_FILE}",
                "put the old tokenizer back, or prepare the data again with the new one",
            )

    def read(self, start: int, stop: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """Tokens [start, stop) as int64, and the numbers of the documents they belong to, ascending.

        Raises DataError naming the shard if an id is outside the vocabulary of `dataset.json`.
        """
        parts: list[np.ndarray] = []
        documents: list[int] = []
        number = bisect.bisect_right(self._token_ends, start)
        while start < stop:
            shard = self._shard(number)
            base = self._token_ends[number] - shard.num_tokens
            end = min(stop, self._token_ends[number])
            part = shard.tokens[start - base : end - base].astype(np.int64)
            if part.max() >= self.info.vocab_size or part.min() < 0:
                raise DataError(
                    f"{shard.bin_path} holds token {int(part.max())} where {DATASET_FILE} says "
                    f"vocab_size {self.info.vocab_size}",
                    "the tokenizer does not match the shard, or the shard is damaged: prepare the data again",
                )
            first_document = self._document_ends[number] - shard.num_documents
            documents += range(
                first_document + shard.document_of(start - base), first_document + shard.document_of(end - 1 - base) + 1
            )
            parts.append(part)
            start, number = end, number + 1
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)), tuple(documents)
