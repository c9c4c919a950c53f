"""Text, JSON lines or Parquet to tokenised shards: `python -m chimera_train.data.prepare`.

The corpus is cut into splits, each split becomes one shard, splits are worked on in parallel, and `dataset.json` is
written when all are done. The output depends on the inputs and the options alone, not on the number of workers and not
on how often the work was interrupted. `output.py` has the layout of the folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chimera_train.config.contract import ERROR_FILE_VARIABLE
from chimera_train.config.data import MAX_TRAINED_VOCAB_SIZE, MIN_TRAINED_VOCAB_SIZE
from chimera_train.config.decode import sha256_of

from .dataset import DATASET_FILE, TOKENIZER_FILE, TokenDataset, file_sha256, read_info
from .errors import DataError, PrepareFailed
from .indexed import token_dtype
from .interrupt import interrupt_blocked, noted_stop
from .output import (
    PrepareSettings,
    claim,
    finish,
    finished_part,
    has_finished_shards,
    kept,
    lock,
    remove_torn_files,
)
from .progress import Progress, ShowProgress, show_progress
from .sources import InputFile, Piece, cut, find_inputs, read_piece
from .split import HELD_OUT_FOLDER, PARTS_FOLDER, Part, SplitSettings, encode_split, run_split, start_worker
from .stdlib_corpus import stdlib_description, stdlib_inputs
from .tokenizer import DocumentEncoder, train_tokenizer

STDLIB = "stdlib"
STDLIB_VOCAB_SIZE = 4096
STDLIB_HELD_OUT_PERCENT = 1.0
_TRAINING_CHARACTERS = 64_000_000
"""A tokenizer is trained on at most this much text, taken from all over the corpus."""
_MIN_SPLIT_BYTES = 1_000_000
_MAX_SPLIT_BYTES = 256_000_000
_NUM_SPLITS = 16
_LEAST_MB, _MOST_MB = 1e-6, 1e9
"""A byte and a petabyte."""

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_FAILED = 4
EXIT_STOPPED = 5


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    source: tuple[str, ...]
    """`("stdlib",)`, or files, folders and glob patterns."""
    output: Path
    tokenizer: Path | None = None
    """A `tokenizer.json`, or a folder with one."""
    train_tokenizer: int | None = None
    """Instead: train one of this vocabulary on the corpus. `stdlib` does so by itself."""
    eod_token: str | None = None
    """Token that ends a document; None takes the tokenizer's, by its usual names."""
    text_key: str = "text"
    """Key of the text in JSON lines, column in Parquet."""
    document_per_line: bool = False
    """Plain text: a line is a document. False: a file is."""
    held_out_percent: float | None = None
    """Share of the documents that goes to `val/`; None is 1 for `stdlib`, else 0."""
    shard_mb: float | None = None
    """Input a shard, in MB (1e6 bytes); None: a sixteenth of the corpus, within 1 and 256 MB."""
    limit_mb: float | None = None
    """Use about this much of the input, from its beginning."""
    skip_bad: bool = False
    """Leave out documents that cannot be read, and count them."""
    num_workers: int | None = None
    """Processes; None is one a usable CPU. 1 works in this process."""


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    output: str
    num_shards: int
    num_documents: int
    num_tokens: int
    vocab_size: int
    dtype: str
    num_held_out_documents: int
    num_held_out_tokens: int
    num_bad: int
    num_empty: int
    already_done: bool
    """Everything was there; nothing was done."""
    seconds: float


def prepare(options: PrepareOptions, progress: ShowProgress = lambda _: None) -> PrepareResult:
    """Prepare a corpus, or go on with one that was interrupted.

    With more than one worker the calling script must be importable (`if __name__ == "__main__":`), as for everything
    that uses multiprocessing. Raises DataError before anything is started and PrepareFailed under way; Ctrl-C stops the
    workers and is raised again. The latter two say what was kept.
    """
    started = time.monotonic()
    try:
        _check_ranges(options)
        inputs = _inputs(options)
        num_bytes = sum(file.num_bytes for file in inputs)
        limit_bytes = None if options.limit_mb is None else int(options.limit_mb * 1e6)
        split_bytes = _split_bytes(options, num_bytes if limit_bytes is None else min(num_bytes, limit_bytes))
        settings = _settings(options, inputs, split_bytes, limit_bytes)
        splits = cut(inputs, text_key=options.text_key, split_bytes=split_bytes, limit_bytes=limit_bytes)
        if num_bytes == 0 or not splits:
            raise DataError(f"the corpus is empty: {len(inputs)} file(s), {num_bytes} bytes")
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    with lock(options.output):
        already_done = claim(options.output, settings)
        if not already_done:
            with _saying_what_was_kept(options.output, len(splits)):
                finish(options.output, settings, _make_shards(options, settings, splits, progress))
    return _result(options.output, already_done, time.monotonic() - started)


def _check_ranges(options: PrepareOptions) -> None:
    """Raises DataError. NaN is within no bounds."""
    for name, value in (("--shard-mb", options.shard_mb), ("--limit-mb", options.limit_mb)):
        if value is not None and not _LEAST_MB <= value <= _MOST_MB:
            raise DataError(f"{name} {value} is out of range: MB (1e6 bytes), {_LEAST_MB:g} to {_MOST_MB:g}")
    if options.held_out_percent is not None and not 0 <= options.held_out_percent < 100:
        raise DataError(f"--held-out {options.held_out_percent} is out of range: percent, from 0 to below 100")
    if options.num_workers is not None and options.num_workers < 1:
        raise DataError(f"--workers {options.num_workers} is out of range: at least 1")


def _inputs(options: PrepareOptions) -> list[InputFile]:
    if options.source == (STDLIB,):
        return stdlib_inputs()
    return find_inputs(options.source, document_per_line=options.document_per_line)


def _split_bytes(options: PrepareOptions, num_bytes: int) -> int:
    if options.shard_mb is not None:
        return int(options.shard_mb * 1e6)
    return max(_MIN_SPLIT_BYTES, min(_MAX_SPLIT_BYTES, num_bytes // _NUM_SPLITS))


def _settings(
    options: PrepareOptions, inputs: Sequence[InputFile], split_bytes: int, limit_bytes: int | None
) -> PrepareSettings:
    """`skip_bad` is not in it: a shard that was finished without it holds no bad document."""
    stdlib = options.source == (STDLIB,)
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise DataError("--tokenizer and --train-tokenizer exclude each other")
    if options.tokenizer is not None:
        path = _given_tokenizer(options.tokenizer)
        DocumentEncoder(path, options.eod_token)  # for its errors, before anything is started
        tokenizer = f"sha256:{file_sha256(path)}"
    elif options.train_tokenizer is not None or stdlib:
        vocab_size = STDLIB_VOCAB_SIZE if options.train_tokenizer is None else options.train_tokenizer
        if vocab_size > MAX_TRAINED_VOCAB_SIZE:
            raise DataError(f"--train-tokenizer {vocab_size} is out of range: at most {MAX_TRAINED_VOCAB_SIZE}")
        if vocab_size < MIN_TRAINED_VOCAB_SIZE:
            raise DataError(
                f"--train-tokenizer {vocab_size}: the bytes and the end-of-document token are "
                f"{MIN_TRAINED_VOCAB_SIZE} already"
            )
        if options.eod_token is not None:
            raise DataError("--eod-token would be ignored: a tokenizer that is trained here has its own")
        tokenizer = f"trained:{vocab_size}"
    else:
        raise DataError("no tokenizer", "give --tokenizer tokenizer.json, or --train-tokenizer VOCABULARY")
    formats = {file.format for file in inputs}
    if options.document_per_line and "lines" not in formats:
        raise DataError("--document-per-line would be ignored: no plain text among the inputs")
    if options.text_key != "text" and formats <= {"text", "lines"}:
        raise DataError(f"--text-key {options.text_key} would be ignored: neither JSON lines nor Parquet is there")
    held_out = options.held_out_percent
    if held_out is None:
        held_out = STDLIB_HELD_OUT_PERCENT if stdlib else 0.0
    return PrepareSettings(
        source=stdlib_description() if stdlib else " ".join(options.source),
        num_files=len(inputs),
        num_bytes=sum(file.num_bytes for file in inputs),
        inputs_sha256=sha256_of([asdict(file) for file in inputs]),
        text_key=options.text_key,
        tokenizer=tokenizer,
        eod_token=options.eod_token,
        held_out_percent=float(held_out),
        split_bytes=split_bytes,
        limit_bytes=limit_bytes,
    )


def _given_tokenizer(path: Path) -> Path:
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"--tokenizer {path}: no such file", f"give a {TOKENIZER_FILE} of the tokenizers library")
    return file


@contextmanager
def _saying_what_was_kept(output: Path, num_splits: int) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {kept(output, num_splits)}") from None
    except (DataError, OSError, BrokenProcessPool) as error:
        if isinstance(error, DataError):
            message, fix = error.message, f"{error.fix}; " if error.fix else ""
            if has_finished_shards(output):
                fix += "with --skip-bad or without, the same command goes on from there; mended inputs or other "
                fix += f"options need another --output, or {output} deleted"
            else:
                fix += "mended inputs and other options can go to the same --output"
        elif isinstance(error, OSError):
            message, fix = f"{error.filename or output}: {error.strerror}", "the same command goes on from there"
        else:
            message = "a worker process died (out of memory?)"
            fix = "use fewer --workers; the same command goes on from there"
        raise PrepareFailed(f"{message}; {kept(output, num_splits)}", fix) from error


def _make_shards(
    options: PrepareOptions, settings: PrepareSettings, splits: list[list[Piece]], progress: ShowProgress
) -> list[Part]:
    """Do what is not done yet; the parts of all splits in their order."""
    output = options.output
    remove_torn_files(output)
    (output / PARTS_FOLDER).mkdir(exist_ok=True)
    if settings.held_out_percent:
        (output / HELD_OUT_FOLDER).mkdir(exist_ok=True)
    total = sum(piece.num_bytes for split in splits for piece in split)
    progress(Progress("tokenizer", 0, 0, total, 0, 0, len(splits), 0.0))
    encoder = _tokenizer(options, settings, splits)
    split_settings = SplitSettings(
        output=output,
        tokenizer=output / TOKENIZER_FILE,
        eod_token=settings.eod_token,
        dtype=token_dtype(encoder.vocab_size),
        text_key=settings.text_key,
        skip_bad=options.skip_bad,
        held_out_percent=settings.held_out_percent,
    )
    parts = {number: part for number in range(len(splits)) if (part := finished_part(output, number)) is not None}
    todo = {number: split for number, split in enumerate(splits) if number not in parts}
    bytes_kept = sum(piece.num_bytes for number in parts for piece in splits[number])
    started = time.monotonic()

    def show(num_bytes: int, num_tokens: int) -> None:
        elapsed = time.monotonic() - started
        done = bytes_kept + num_bytes
        progress(Progress("shards", done, bytes_kept, total, num_tokens, len(parts), len(splits), elapsed))

    num_workers = min(options.num_workers or _num_cpus(), len(todo))
    if num_workers <= 1:
        _encode_here(todo, split_settings, encoder, parts, show)
    else:
        _encode_in_processes(num_workers, todo, split_settings, parts, show)
    return [parts[number] for number in sorted(parts)]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenizer(options: PrepareOptions, settings: PrepareSettings, splits: list[list[Piece]]) -> DocumentEncoder:
    """Put `tokenizer.json` into the output, given or trained, unless an earlier run has."""
    path = options.output / TOKENIZER_FILE
    if not path.exists():
        part = path.with_name(f"{path.name}.part-{os.getpid()}")
        if options.tokenizer is not None:
            shutil.copyfile(_given_tokenizer(options.tokenizer), part)
        else:
            vocab_size = int(settings.tokenizer.removeprefix("trained:"))
            train_tokenizer(_training_texts(splits, options), vocab_size, part)
        os.replace(part, path)
    return DocumentEncoder(path, settings.eod_token)


def _training_texts(splits: list[list[Piece]], options: PrepareOptions) -> Iterator[str]:
    """The beginning of every split, so that the sample is from all over the corpus."""

    def on_bad(where: str, reason: str) -> None:
        if not options.skip_bad:
            raise DataError(f"{where}: {reason}", "--skip-bad leaves such documents out")

    for split in splits:
        left = _TRAINING_CHARACTERS // len(splits)
        for piece in split:
            for document in read_piece(piece, text_key=options.text_key, on_bad=on_bad):
                if left <= 0:
                    break
                yield document.text[:left]
                left -= len(document.text)


def _encode_here(
    todo: dict[int, list[Piece]],
    settings: SplitSettings,
    encoder: DocumentEncoder,
    parts: dict[int, Part],
    show: Callable[[int, int], None],
) -> None:
    done = [0, 0]

    def report(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens
        show(*done)

    for number, pieces in todo.items():
        parts[number] = encode_split(number, pieces, settings, encoder, report)


def _encode_in_processes(
    num_workers: int,
    todo: dict[int, list[Piece]],
    settings: SplitSettings,
    parts: dict[int, Part],
    show: Callable[[int, int], None],
) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy the tokenizer's threads' locks
    counters, stop = context.Array("q", 2), context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=start_worker, initargs=(settings, counters, stop)
    )
    with noted_stop() as stop_requested:
        try:
            with interrupt_blocked():  # the first submit starts the workers
                pending = {pool.submit(run_split, number, pieces) for number, pieces in todo.items()}
            while pending:
                finished, pending = concurrent.futures.wait(
                    pending, timeout=0.5, return_when=concurrent.futures.FIRST_COMPLETED
                )
                if stop_requested():
                    raise KeyboardInterrupt
                for future in finished:
                    part = future.result()
                    parts[part.number] = part
                show(counters[0], counters[1])
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(output: Path, already_done: bool, seconds: float) -> PrepareResult:
    info = read_info(output)
    held_out_folder = output / HELD_OUT_FOLDER
    held_out = read_info(held_out_folder) if (held_out_folder / DATASET_FILE).exists() else None
    return PrepareResult(
        output=str(output),
        num_shards=len(info.shards),
        num_documents=info.num_documents,
        num_tokens=info.num_tokens,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        num_held_out_documents=held_out.num_documents if held_out else 0,
        num_held_out_tokens=held_out.num_tokens if held_out else 0,
        num_bad=info.source["num_bad"],
        num_empty=info.source["num_empty"],
        already_done=already_done,
        seconds=round(seconds, 2),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chimera_sm data prepare",
        description="Turn text into tokenised shards (Megatron .bin/.idx and a dataset.json) that training reads.",
        epilog="Inputs: text, JSON lines (.jsonl .ndjson .json), each also .gz or .zst, and .parquet. An interrupted "
        "preparation goes on where it was when the same command is given again. Exit codes: 0 done, 2 the input or "
        "the command is wrong, 4 failed under way, 5 stopped; after 4 and 5 finished shards are kept.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--source",
        nargs="+",
        metavar="PATH",
        help=f"files, folders (searched for the known suffixes) and glob patterns; or the word {STDLIB}: the source "
        "code of this Python's standard library",
    )
    what.add_argument(
        "--check", type=Path, metavar="DIR", help="prepare nothing: read every byte of a data set and compare checksums"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the data set; new, or to be gone on with")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, or a folder with one")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCABULARY",
        help=f"train a byte-level BPE on the corpus instead ({STDLIB}: {STDLIB_VOCAB_SIZE} by default)",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document (default: by its usual names)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key in JSON lines or column in Parquet (default: text)"
    )
    parser.add_argument("--document-per-line", action="store_true", help="plain text: a line is a document, not a file")
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="PERCENT",
        help=f"documents to put into DIR/val instead (default: 0; {STDLIB}: {STDLIB_HELD_OUT_PERCENT:g})",
    )
    parser.add_argument("--shard-mb", type=float, metavar="MB", help="input a shard (default: corpus / 16, 1 to 256)")
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="use about this much of the input")
    parser.add_argument("--skip-bad", action="store_true", help="leave unreadable documents out, and count them")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a CPU)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.check is not None:
        default = vars(parser.parse_args(["--check", str(given.check)]))
        ignored = [key for key, value in vars(given).items() if key != "json" and value != default[key]]
        if ignored:
            parser.error(f"--check prepares nothing: --{ignored[0].replace('_', '-')} would be ignored")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if given.check is not None:
            result, text = _check(given.check)
        elif given.output is None:
            parser.error("--output DIR is required with --source")
        else:
            result, text = _prepare(given)
    except (DataError, ImportError) as error:
        message = f"{error} (fix: pip install 'chimera_sm[data]')" if isinstance(error, ImportError) else str(error)
        _tell(message)
        return EXIT_FAILED if isinstance(error, PrepareFailed) else EXIT_USAGE
    except KeyboardInterrupt as stop:
        print(f"prepare: {stop or 'stopped before anything was written'}", file=sys.stderr)
        return EXIT_STOPPED
    print(json.dumps(result) if given.json else text)
    return EXIT_DONE


def _tell(message: str) -> None:
    """Say it to the program that called and asks for it in a file, else on stderr."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    try:
        if path:
            Path(path).write_text(json.dumps({"message": message}))
            return
    except OSError:
        pass
    print(f"prepare: error: {message}", file=sys.stderr)


def _prepare(given: argparse.Namespace) -> tuple[dict[str, Any], str]:
    options = PrepareOptions(
        source=tuple(given.source),
        output=given.output,
        tokenizer=given.tokenizer,
        train_tokenizer=given.train_tokenizer,
        eod_token=given.eod_token,
        text_key=given.text_key,
        document_per_line=given.document_per_line,
        held_out_percent=given.held_out,
        shard_mb=given.shard_mb,
        limit_mb=given.limit_mb,
        skip_bad=given.skip_bad,
        num_workers=given.workers,
    )
    with show_progress() as progress:
        result = prepare(options, progress)
    text = (
        f"{result.output}: {result.num_documents:,} documents, {result.num_tokens:,} tokens, vocabulary "
        f"{result.vocab_size:,}, {result.num_shards} shard(s)"
        + (f"; held out: {result.num_held_out_documents:,} documents" if result.num_held_out_documents else "")
        + (f"; left out: {result.num_bad:,} documents that could not be read" if result.num_bad else "")
        + (" (was already prepared)" if result.already_done else f" in {result.seconds:,.1f} s")
    )
    return asdict(result), text


def _check(folder: Path) -> tuple[dict[str, Any], str]:
    info = TokenDataset(folder, verify_checksums=True).info
    result = {"output": str(folder), "num_documents": info.num_documents, "num_tokens": info.num_tokens}
    return result, f"{folder}: every checksum is right ({info.num_documents:,} documents, {info.num_tokens:,} tokens)"


if __name__ == "__main__":
    sys.exit(main())
