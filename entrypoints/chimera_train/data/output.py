"""The output folder of a preparation: whose it is, what of it is finished, and how it is closed.

prepare.json       options and a digest of the inputs: the same folder takes no other ones
tokenizer.json
shard-00000.bin, .idx, …
parts/00000.json   marker of a finished shard; the folder goes when all are finished
dataset.json       last
val/               the held-out documents, a data set of its own
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chimera_train.config.decode import ConfigError, decode, encode

from .dataset import (
    DATASET_FILE,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    DatasetInfo,
    TokenizerInfo,
    file_sha256,
    write_json,
)
from .errors import DataError
from .indexed import ShardInfo, bin_path, idx_path, token_dtype
from .split import HELD_OUT_FOLDER, PARTS_FOLDER, Part, marker_path
from .tokenizer import DocumentEncoder

SETTINGS_FILE = "prepare.json"


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What the output depends on, as `prepare.json` keeps it."""

    schema_version: int = SCHEMA_VERSION
    source: str
    """For people; not compared."""
    num_files: int
    num_bytes: int
    inputs_sha256: str
    """Over path, format, size and time of change of every input file, in order."""
    text_key: str
    tokenizer: str
    """`sha256:…` of the given file, or `trained:<vocabulary>`."""
    eod_token: str | None
    held_out_percent: float
    split_bytes: int
    limit_bytes: int | None


@contextmanager
def lock(output: Path) -> Iterator[None]:
    """Nobody else prepares into this folder meanwhile. A file system without locks is trusted."""
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{output}: another prepare is at work in this folder", "wait for it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
        yield
    finally:
        os.close(descriptor)


def claim(output: Path, settings: PrepareSettings) -> bool:
    """Make the folder this preparation's, or find that it is. True if it is finished already.

    Raises DataError if it holds anything else.
    """
    path = output / SETTINGS_FILE
    if not path.exists():
        others = sorted(entry.name for entry in output.iterdir() if not entry.name.startswith(f"{SETTINGS_FILE}.part"))
        if others:
            raise DataError(
                f"{output} is not empty ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}) and was not made "
                "by prepare: nothing is overwritten",
                "choose a new folder with --output",
            )
        write_json(path, settings)
        return False
    try:
        known = encode(decode(PrepareSettings, json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, ConfigError) as error:
        raise DataError(f"{path} is damaged: {error}", "choose a new folder with --output") from error
    changed = [key for key, value in encode(settings).items() if key != "source" and known[key] != value]
    if changed:
        shown = "; ".join(f"{key} was {known[key]!r}, is {encode(settings)[key]!r}" for key in changed)
        raise DataError(
            f"{output} was prepared from other inputs or with other options ({shown}): nothing is overwritten",
            "choose a new folder with --output, or go on with the old options",
        )
    return (output / DATASET_FILE).exists()


def remove_torn_files(output: Path) -> None:
    """What killed workers left under temporary names."""
    for folder in (output, output / HELD_OUT_FOLDER):
        for stale in folder.glob("*.part-*"):
            stale.unlink()


def finished_part(output: Path, number: int) -> Part | None:
    """The part whose marker and shards are there, at full length."""
    try:
        part = decode(Part, json.loads(marker_path(output, number).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, ConfigError):
        return None
    for folder, shard in ((output, part.train), (output / HELD_OUT_FOLDER, part.held_out)):
        if shard is not None:
            prefix = folder / shard.prefix
            if not idx_path(prefix).exists() or not bin_path(prefix).exists():
                return None
            if bin_path(prefix).stat().st_size != shard.bin_bytes:
                return None
    return part


def kept(output: Path, num_splits: int) -> str:
    num_done = len(list((output / PARTS_FOLDER).glob("*.json")))
    return f"kept in {output}: {num_done} of {num_splits} shards"


def finish(output: Path, settings: PrepareSettings, parts: Sequence[Part]) -> None:
    """Write the `dataset.json` of the held-out part and, last, of the data set."""
    shards = tuple(part.train for part in parts if part.train)
    held_out = tuple(part.held_out for part in parts if part.held_out)
    if not shards:
        raise DataError(f"the corpus is empty: {settings.num_files} file(s) hold no document with text")
    if held_out:
        shutil.copyfile(output / TOKENIZER_FILE, output / HELD_OUT_FOLDER / TOKENIZER_FILE)
        _write_dataset(output / HELD_OUT_FOLDER, settings, parts, held_out)
    _write_dataset(output, settings, parts, shards)
    shutil.rmtree(output / PARTS_FOLDER)


def _write_dataset(
    folder: Path, settings: PrepareSettings, parts: Sequence[Part], shards: tuple[ShardInfo, ...]
) -> None:
    tokenizer = folder / TOKENIZER_FILE
    encoder = DocumentEncoder(tokenizer, settings.eod_token)
    info = DatasetInfo(
        schema_version=SCHEMA_VERSION,
        shards=shards,
        num_documents=sum(shard.num_documents for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        vocab_size=encoder.vocab_size,
        dtype=token_dtype(encoder.vocab_size),
        eod_id=encoder.eod_id,
        tokenizer=TokenizerInfo(file=TOKENIZER_FILE, sha256=file_sha256(tokenizer)),
        source={
            "description": settings.source,
            "num_files": settings.num_files,
            "num_bytes": settings.num_bytes,
            "held_out_percent": settings.held_out_percent,
            "num_bad": sum(part.num_bad for part in parts),
            "num_empty": sum(part.num_empty for part in parts),
        },
    )
    write_json(folder / DATASET_FILE, info)
