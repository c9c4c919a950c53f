"""Whether a folder of shards is whole, by names, sizes and headers: what costs little before anything starts.

The format is that of `chimera_train.data` (`dataset.json`, Megatron's `.bin` and `.idx`), which checks every entry when
it opens the shards; it needs numpy, and the launching side goes without.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<9sQBQQ")
"""Of an `.idx`: magic, version, code of the token type, sequences, length of the document index."""
MAGIC = b"MMIDIDX\0\0"
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Code of the token type → bytes of a token."""


def shards_problem(folder: Path, dataset: Any) -> str | None:
    """What is wrong with the shards that `dataset`, the content of the folder's `dataset.json`, names."""
    try:
        if not dataset["shards"]:
            return f"{folder / 'dataset.json'} names no shard"
        tokens = sum(shard["num_tokens"] for shard in dataset["shards"])
        if tokens != dataset["num_tokens"]:
            return f"{folder / 'dataset.json'} is damaged: {dataset['num_tokens']} tokens, {tokens} over its shards"
        for shard in dataset["shards"]:
            if problem := _shard_problem(folder / shard["prefix"], shard):
                return problem
        return _tokenizer_problem(folder / dataset["tokenizer"]["file"], dataset["tokenizer"]["sha256"])
    except (LookupError, TypeError, AttributeError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        return f"{folder / 'dataset.json'} is damaged: {missing}"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _shard_problem(prefix: Path, shard: dict[str, Any]) -> str | None:
    tokens_file, index_file = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    for file in (tokens_file, index_file):
        if not file.is_file():
            return f"{file} is missing"
    size = tokens_file.stat().st_size
    if size != shard["bin_bytes"]:
        return f"{tokens_file} has {size} bytes where dataset.json says {shard['bin_bytes']}"
    with index_file.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        return f"{index_file} is no Megatron index"
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1 or code not in TOKEN_BYTES:
        return f"{index_file} has version {version} and token type {code}, which the trainer does not read"
    expected = HEADER.size + 12 * sequences + 8 * documents
    if index_file.stat().st_size not in (expected, expected + sequences):  # the latter with modes: multimodal
        return f"{index_file} has {index_file.stat().st_size} bytes where its header needs {expected}"
    if documents - 1 != shard["num_documents"]:
        return f"{index_file} has {documents - 1} documents where dataset.json says {shard['num_documents']}"
    if size == 0 or size != shard["num_tokens"] * TOKEN_BYTES[code]:
        return f"{tokens_file} has {size} bytes, which are not the {shard['num_tokens']} tokens of dataset.json"
    return None


def _tokenizer_problem(file: Path, sha256: str) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
            return f"{file} is not the tokenizer that made the shards: its SHA-256 is not the one in dataset.json"
    return None
