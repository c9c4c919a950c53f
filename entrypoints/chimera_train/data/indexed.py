"""Megatron's `.bin` / `.idx` pair: one shard of tokenised documents, written in one pass, read by memory map.

Layout, little endian, as megatron-core's `megatron/core/datasets/indexed_dataset.py` (commit 00caa53, 2026) writes it.
`.bin` holds the tokens of all sequences one after the other, nothing else. `.idx` holds

    bytes   type     what
    9                b"MMIDIDX\\0\\0"
    8       uint64   version, 1
    1       uint8    type of a token: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
    8       uint64   S, number of sequences
    8       uint64   D, length of the document index
    4 · S   int32    tokens of each sequence
    8 · S   int64    byte offset of each sequence in `.bin`
    8 · D   int64    document index: document i is the sequences [index[i], index[i + 1])
    S       int8     modes of the sequences; multimodal sets only

The document index begins with 0 and ends with S, so it is one longer than there are documents. Shards written here
have one sequence a document, and the last token of a document is the end-of-document token.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import numpy as np

from .errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype).name: code for code, dtype in TOKEN_DTYPES.items()}
TokenDtype = Literal["uint16", "int32"]
_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> TokenDtype:
    """The narrower type that holds every id. Megatron's own writer goes wide from 65,500 ids on; readers take both."""
    return "uint16" if vocab_size < 65_536 else "int32"


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What `dataset.json` says of a shard."""

    prefix: str
    """File name without `.bin` and `.idx`, in the folder of `dataset.json`."""
    num_documents: int
    num_tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_sha256: str


class ShardWriter:
    """Writes one shard under temporary names and gives it its own at `finish`, so that a shard is there whole or not
    at all. As a context manager it removes what an exception leaves."""

    def __init__(self, prefix: Path, dtype: TokenDtype):
        self.prefix = prefix
        self._dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._digest = hashlib.sha256()
        self._num_tokens = 0
        suffix = f".part-{os.getpid()}"
        self._bin_part = bin_path(prefix).with_name(bin_path(prefix).name + suffix)
        self._idx_part = idx_path(prefix).with_name(idx_path(prefix).name + suffix)
        self._bin = open(self._bin_part, "wb")  # noqa: SIM115 - closed by finish or __exit__

    def add(self, tokens: np.ndarray) -> None:
        """Append one document: ids of any integer type, shape [length], end-of-document token included."""
        data = tokens.astype(self._dtype).tobytes()
        self._bin.write(data)
        self._digest.update(data)
        self._lengths.append(len(tokens))
        self._num_tokens += len(tokens)

    def finish(self) -> ShardInfo | None:
        """Flush both files to the disk and name them. None, and no files, if no document was added."""
        if not self._lengths:
            self._discard()
            return None
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        pointers = ends - lengths.astype(np.int64) * self._dtype.itemsize
        num = len(lengths)
        index = HEADER.pack(MAGIC, VERSION, CODES[self._dtype.name], num, num + 1)
        index += lengths.tobytes() + pointers.tobytes() + np.arange(num + 1, dtype=np.int64).tobytes()
        with open(self._idx_part, "wb") as file:
            file.write(index)
            _flush(file)
        _flush(self._bin)
        self._bin.close()
        os.replace(self._bin_part, bin_path(self.prefix))
        os.replace(self._idx_part, idx_path(self.prefix))
        return ShardInfo(
            prefix=self.prefix.name,
            num_documents=num,
            num_tokens=self._num_tokens,
            bin_bytes=self._num_tokens * self._dtype.itemsize,
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
        )

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the flush fails too; the first error is the one to show
            self._bin.close()
        self._bin_part.unlink(missing_ok=True)
        self._idx_part.unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class IndexedShard:
    """One shard, memory-mapped.

    Opening costs O(1): it checks the header and that both files have the length that the header and the last sequence
    call for. `check_index` checks every entry. Both raise DataError with the file and the rule.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.idx_path, self.bin_path = idx_path(prefix), bin_path(prefix)
        code, num_sequences, index_length = self._read_header()
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = HEADER.size
        self._lengths = raw[at : at + 4 * num_sequences].view(np.ndarray).view(np.int32)
        at += 4 * num_sequences
        self._pointers = raw[at : at + 8 * num_sequences].view(np.ndarray).view(np.int64)
        at += 8 * num_sequences
        self._documents = raw[at : at + 8 * index_length].view(np.ndarray).view(np.int64)
        self.num_documents = index_length - 1
        self._check_ends()
        self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)
        """All tokens of the shard, in order: shape [num_tokens], read-only."""
        self.num_tokens = len(self.tokens)

    def _read_header(self) -> tuple[int, int, int]:
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(f"{path} is missing", "copy the shard again, or prepare the data again")
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
            raise DataError(f"{self.idx_path} is no Megatron index: it does not begin with MMIDIDX")
        if len(head) < HEADER.size:
            raise DataError(f"{self.idx_path} is truncated: {size} bytes do not hold the header", "copy it again")
        _, version, code, num_sequences, index_length = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(f"{self.idx_path} has version {version}; this reader knows version {VERSION}")
        if code not in TOKEN_DTYPES:
            known = ", ".join(f"{code} {np.dtype(dtype).name}" for code, dtype in TOKEN_DTYPES.items())
            raise DataError(f"{self.idx_path} has token type {code}, which is not one of: {known}")
        if num_sequences == 0 or index_length < 2:
            raise DataError(
                f"{self.idx_path} is an empty shard: it holds no document", "leave it out, or prepare again"
            )
        expected = HEADER.size + 12 * num_sequences + 8 * index_length
        if size not in (expected, expected + num_sequences):  # with modes: multimodal
            raise DataError(
                f"{self.idx_path} has {size} bytes where {num_sequences} sequences and {index_length - 1} documents "
                f"need {expected}",
                "it is truncated or damaged: copy it again",
            )
        return code, num_sequences, index_length

    def _check_ends(self) -> None:
        expected = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        size = self.bin_path.stat().st_size
        if size != expected:
            raise DataError(
                f"{self.bin_path} has {size} bytes where {self.idx_path.name} counts {expected}",
                "it is truncated or belongs to another index: copy both files again",
            )
        if size == 0:
            raise DataError(f"{self.bin_path} is an empty shard: it holds no token", "leave it out, or prepare again")
        first, last = int(self._documents[0]), int(self._documents[-1])
        if first != 0 or last != len(self._lengths):
            raise DataError(
                f"{self.idx_path}: its document index runs from {first} to {last}, out of the range "
                f"0 to {len(self._lengths)} of its sequences",
                "it is damaged: copy it again, or prepare the data again",
            )

    def check_index(self) -> None:
        """Check every entry: sequences follow each other without a gap, documents ascend. O(sequences)."""
        damaged = "it is damaged: copy it again, or prepare the data again"
        end = 0
        for at in range(0, len(self._lengths), _BLOCK):
            nbytes = self._lengths[at : at + _BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(nbytes)
            wrong = np.flatnonzero((nbytes < 0) | (self._pointers[at : at + _BLOCK] != ends - nbytes))
            if wrong.size:
                raise DataError(
                    f"{self.idx_path}: sequence {at + wrong[0]} does not begin where the last ends", damaged
                )
            end = int(ends[-1])
        for at in range(0, len(self._documents) - 1, _BLOCK):
            wrong = np.flatnonzero(np.diff(self._documents[at : at + _BLOCK + 1]) < 0)
            if wrong.size:
                raise DataError(f"{self.idx_path}: document {at + wrong[0]} is out of range", damaged)

    def document(self, number: int) -> np.ndarray:
        """Tokens of one document, shape [length], without a copy."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.prefix}")
        first, last = int(self._documents[number]), int(self._documents[number + 1])
        if first == last:
            return self.tokens[:0]
        start = int(self._pointers[first])
        stop = int(self._pointers[last - 1]) + int(self._lengths[last - 1]) * self.dtype.itemsize
        return self.tokens[start // self.dtype.itemsize : stop // self.dtype.itemsize]

    def document_of(self, token: int) -> int:
        """Number of the document that holds the token at this offset. O(log n).

        bisect, because the arrays are unaligned in the file and `np.searchsorted` would copy them whole.
        """
        sequence = bisect.bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        return bisect.bisect_right(self._documents, sequence) - 1
