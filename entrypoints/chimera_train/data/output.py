"""The output folder of a preparation: whose it is, what of it is finished, and how it is closed.

prepare.json       options and a digest of the inputs: once a shard is finished, the folder takes no other ones
tokenizer.json
shard-00000.bin, .idx, …
parts/00000.json   marker of a finished shard; the folder goes when all are finished
dataset.json       last
val/               the held-out documents, a data set of its own
"""

from __future__ import annotations

import contextlib
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

    What another preparation left there goes if it had not finished a shard (its inputs were damaged, an option was
    wrong). Raises DataError if the folder holds anything else.
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
        fix = f"choose another folder with --output, or delete {output}"
        raise DataError(f"{path} is damaged: {error}", fix) from error
    changed = [key for key, value in encode(settings).items() if key != "source" and known[key] != value]
    if changed and not has_finished_shards(output):
        _clear(output)
        write_json(path, settings)
        return False
    if changed:
        shown = "; ".join(f"{key} was {known[key]!r}, is {encode(settings)[key]!r}" for key in changed)
        raise DataError(
            f"{output} was prepared from other inputs or with other options ({shown}): nothing is overwritten",
            f"choose another folder with --output; or delete {output}; or give the old options and inputs to go on",
        )
    return (output / DATASET_FILE).exists()


def has_finished_shards(output: Path) -> bool:
    """Whether a shard with documents in it is finished: work that would be lost."""
    if (output / DATASET_FILE).exists():
        return True
    parts = [finished_part(output, int(marker.stem)) for marker in (output / PARTS_FOLDER).glob("[0-9]*.json")]
    return any(part is not None and (part.train or part.held_out) for part in parts)


def _clear(output: Path) -> None:
    """Remove what a preparation that finished no shard has written; its own files, by their names, and no others."""
    remove_torn_files(output)
    shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
    (output / TOKENIZER_FILE).unlink(missing_ok=True)
    for folder in (output, output / HELD_OUT_FOLDER):
        for shard in folder.glob("shard-[0-9][0-9][0-9][0-9][0-9].*"):
            shard.unlink()
    with contextlib.suppress(OSError):  # not there, or the user's own things are in it
        (output / HELD_OUT_FOLDER).rmdir()


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
        shutil.rmtree(output / PARTS_FOLDER)  # so that a corrected command finds nothing finished
        raise _nothing_to_train_on(settings, parts, held_out)
    if held_out:
        shutil.copyfile(output / TOKENIZER_FILE, output / HELD_OUT_FOLDER / TOKENIZER_FILE)
        _write_dataset(output / HELD_OUT_FOLDER, settings, parts, held_out)
    _write_dataset(output, settings, parts, shards)
    shutil.rmtree(output / PARTS_FOLDER)


def _nothing_to_train_on(settings: PrepareSettings, parts: Sequence[Part], held_out: Sequence[ShardInfo]) -> DataError:
    if held_out:
        num_documents = sum(shard.num_documents for shard in held_out)
        return DataError(f"all of the {num_documents} document(s) were held out", "give a smaller --held-out, or more")
    if num_bad := sum(part.num_bad for part in parts):
        return DataError(
            f"every document is bad: --skip-bad left out all {num_bad} of {settings.num_files} file(s)",
            "without --skip-bad the first one's reason is told",
        )
    return DataError(f"the corpus is empty: {settings.num_files} file(s) hold no document with text")


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
