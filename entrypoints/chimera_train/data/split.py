"""One split of the corpus to one shard: what a worker process of the preparation does.

A split is finished when its marker `parts/<number>.json` is there, which is written last. A killed worker leaves files
under temporary names at most.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dataset import write_json
from .errors import DataError
from .indexed import ShardInfo, ShardWriter, TokenDtype
from .order import derive_seed
from .sources import Piece, read_piece
from .tokenizer import DocumentEncoder

PARTS_FOLDER = "parts"
HELD_OUT_FOLDER = "val"
_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class SplitSettings:
    """What is equal for all splits."""

    output: Path
    tokenizer: Path
    eod_token: str | None
    dtype: TokenDtype
    text_key: str
    skip_bad: bool
    held_out_percent: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """What became of a split: the content of its marker."""

    number: int
    train: ShardInfo | None
    """None: no document."""
    held_out: ShardInfo | None
    num_bad: int
    """Documents that could not be read and were left out."""
    num_empty: int


Report = Callable[[int, int], None]
"""Called with input bytes and tokens done since the last call; raises to stop."""


def marker_path(output: Path, number: int) -> Path:
    return output / PARTS_FOLDER / f"{number:05d}.json"


def encode_split(
    number: int, pieces: Sequence[Piece], settings: SplitSettings, encoder: DocumentEncoder, report: Report
) -> Part:
    """Write the shard of one split (and the one of its held-out documents), then its marker."""
    num_bad = num_empty = num_documents = 0
    texts: list[str] = []
    num_characters = num_bytes = 0

    def on_bad(where: str, reason: str) -> None:
        nonlocal num_bad
        if not settings.skip_bad:
            raise DataError(f"{where}: {reason}", "--skip-bad leaves such documents out")
        num_bad += 1

    with ExitStack() as stack:
        name = f"shard-{number:05d}"
        train = stack.enter_context(ShardWriter(settings.output / name, settings.dtype))
        held_out = None
        if settings.held_out_percent:
            held_out = stack.enter_context(ShardWriter(settings.output / HELD_OUT_FOLDER / name, settings.dtype))

        def flush() -> None:
            nonlocal num_documents, num_characters, num_bytes
            num_tokens = 0
            for tokens in encoder.encode(texts):
                writer = train
                if held_out and derive_seed(number, num_documents) % 10_000 < settings.held_out_percent * 100:
                    writer = held_out
                writer.add(tokens)
                num_documents += 1
                num_tokens += len(tokens)
            report(num_bytes, num_tokens)
            texts.clear()
            num_characters = num_bytes = 0

        for piece in pieces:
            consumed = 0
            for document in read_piece(piece, text_key=settings.text_key, on_bad=on_bad):
                num_bytes += document.consumed - consumed
                consumed = document.consumed
                if not document.text:
                    num_empty += 1
                    continue
                texts.append(document.text)
                num_characters += len(document.text)
                if num_characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
                    flush()
            num_bytes += piece.num_bytes - consumed
        flush()
        part = Part(
            number=number,
            train=train.finish(),
            held_out=held_out.finish() if held_out else None,
            num_bad=num_bad,
            num_empty=num_empty - num_bad,
        )
    write_json(marker_path(settings.output, number), part)
    return part


class Stopped(Exception):
    """The parent asked the worker to leave its split."""


_worker: Any = None


def start_worker(settings: SplitSettings, counters: Any, stop: Any) -> None:
    """Initialise a worker process. `counters` is a shared array of input bytes and tokens, `stop` a shared event."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too and tells when to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()

    def report(num_bytes: int, num_tokens: int) -> None:
        with counters.get_lock():
            counters[0] += num_bytes
            counters[1] += num_tokens
        if stop.is_set():
            raise Stopped

    _worker = settings, DocumentEncoder(settings.tokenizer, settings.eod_token), report


def run_split(number: int, pieces: Sequence[Piece]) -> Part:
    """`encode_split` in a worker that `start_worker` initialised."""
    settings, encoder, report = _worker
    return encode_split(number, pieces, settings, encoder, report)


def _die_with_parent() -> None:
    """A pool's workers wait for ever when their parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
