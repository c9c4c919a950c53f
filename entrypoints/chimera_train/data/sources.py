"""Documents out of text, JSON lines and Parquet, plain or compressed; and the cut of a corpus into splits.

A split is what one worker turns into one shard. The cut depends on the inputs and the wanted size alone, never on the
number of workers, so that the output does not either. Lines and row groups can be cut anywhere; a compressed file and
a file that is one document cannot.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from .errors import DataError

Format = Literal["text", "lines", "jsonl", "parquet"]
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 1024


class Document(NamedTuple):
    text: str
    consumed: int
    """Bytes of the piece's input that are read once this document is: what progress is measured in."""


@dataclass(frozen=True)
class InputFile:
    path: str
    """Absolute."""
    format: Format
    num_bytes: int
    mtime_ns: int

    @property
    def compression(self) -> str:
        suffix = os.path.splitext(self.path)[1]
        return suffix if suffix in _COMPRESSED_SUFFIXES else ""


@dataclass(frozen=True)
class Piece:
    """A part of one input file: bytes [start, stop) of it, or row groups [start, stop) of a Parquet file."""

    path: str
    format: Format
    start: int
    stop: int
    num_bytes: int


OnBad = Callable[[str, str], None]
"""Called with where (`file:line`) and why for a document that cannot be read; raises, or returns to skip it."""


def find_inputs(sources: Sequence[str], *, document_per_line: bool = False) -> list[InputFile]:
    """The files that paths, folders (recursively) and glob patterns name: in the order given, each group sorted, each
    file once. In folders, only files with a known suffix that are not hidden. Raises DataError."""
    found: dict[str, None] = {}
    for source in sources:
        path = Path(source)
        if path.is_dir():
            matches = [p for p in path.rglob("*") if _is_corpus_file(p.relative_to(path)) and p.is_file()]
            if not matches:
                known = " ".join(_TEXT_SUFFIXES + _JSONL_SUFFIXES + (".parquet",))
                raise DataError(
                    f"{source}: no file with a known suffix in this folder ({known}; also with .gz or .zst)",
                    "name the files, or a pattern such as 'folder/*.log'",
                )
        elif path.is_file():
            matches = [path]
        else:
            matches = [Path(match) for match in glob.glob(source, recursive=True) if os.path.isfile(match)]
            if not matches:
                raise DataError(f"{source}: no such file or folder, and no file matches it as a pattern")
        found.update(dict.fromkeys(str(match.resolve()) for match in sorted(matches, key=lambda p: p.parts)))
    return [_input_file(path, document_per_line) for path in found]


def _is_corpus_file(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts):
        return False
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED_SUFFIXES else path.suffix
    return suffix in _TEXT_SUFFIXES + _JSONL_SUFFIXES + (".parquet",)


def _input_file(path: str, document_per_line: bool) -> InputFile:
    stem = path.removesuffix(".gz").removesuffix(".zst")
    kind: Format = "lines" if document_per_line else "text"
    if stem.endswith(_JSONL_SUFFIXES):
        kind = "jsonl"
    elif path.endswith(".parquet"):
        kind = "parquet"
    stat = os.stat(path)
    return InputFile(path, kind, stat.st_size, stat.st_mtime_ns)


def cut(inputs: Sequence[InputFile], *, text_key: str, split_bytes: int, limit_bytes: int | None) -> list[list[Piece]]:
    """The corpus as splits of about `split_bytes` of input each, in its order; at most about `limit_bytes` in all."""
    splits: list[list[Piece]] = []
    filled, left = 0, limit_bytes
    for piece in _pieces(inputs, text_key, split_bytes):
        if left is not None:
            if left <= 0:
                break
            if piece.format in ("lines", "jsonl") and piece.num_bytes > left and not _is_compressed(piece.path):
                piece = Piece(piece.path, piece.format, piece.start, piece.start + left, left)
            left -= piece.num_bytes
        if not splits or filled + piece.num_bytes > split_bytes:
            splits.append([])
            filled = 0
        splits[-1].append(piece)
        filled += piece.num_bytes
    return splits


def _is_compressed(path: str) -> bool:
    return path.endswith(_COMPRESSED_SUFFIXES)


def _pieces(inputs: Sequence[InputFile], text_key: str, split_bytes: int) -> Iterator[Piece]:
    for file in inputs:
        if file.format == "parquet":
            yield from _parquet_pieces(file, text_key, split_bytes)
        elif file.format == "text" or file.compression:
            yield Piece(file.path, file.format, 0, file.num_bytes, file.num_bytes)
        else:
            for start in range(0, file.num_bytes, split_bytes):
                stop = min(start + split_bytes, file.num_bytes)
                yield Piece(file.path, file.format, start, stop, stop - start)


def read_piece(piece: Piece, *, text_key: str, on_bad: OnBad) -> Iterator[Document]:
    """Documents of a piece, in order. Empty ones are among them. Raises DataError for an input that is damaged as a
    whole (a truncated archive); `on_bad` decides on single documents."""
    if piece.format == "parquet":
        return _read_parquet(piece, text_key, on_bad)
    if piece.format == "text":
        return _read_text(piece, on_bad)
    return _read_lines(piece, text_key, on_bad)


def _read_text(piece: Piece, on_bad: OnBad) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        data = _decompressed(raw, piece.path).read()
    try:
        yield Document(data.decode("utf-8-sig"), piece.num_bytes)
    except UnicodeDecodeError as error:
        on_bad(piece.path, f"byte {error.start} is no UTF-8")


def _read_lines(piece: Piece, text_key: str, on_bad: OnBad) -> Iterator[Document]:
    """The lines that begin in [start, stop); of a compressed file, all."""
    with open(piece.path, "rb") as raw:
        file = _decompressed(raw, piece.path)
        compressed = file is not raw
        offset = piece.start
        if offset:
            raw.seek(offset - 1)
            offset += len(raw.readline()) - 1  # the rest of a line that began before this piece
        number = 0
        while compressed or offset < piece.stop:
            line = file.readline()
            if not line:
                return
            number += 1
            try:
                text = _line_text(line, piece.format, text_key, first=offset == 0)
            except ValueError as error:
                on_bad(f"{piece.path}:{_line_number(piece, number)}", _reason(error))
                text = ""
            offset += len(line)
            consumed = raw.tell() if compressed else min(offset, piece.stop) - piece.start
            yield Document(text, consumed)


def _line_text(line: bytes, kind: Format, text_key: str, *, first: bool) -> str:
    """Text of one line, "" for a blank one. Raises ValueError with the reason."""
    text = line.decode("utf-8-sig" if first else "utf-8").rstrip("\r\n")
    if kind == "lines" or not text.strip():
        return text.strip() and text
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    return _checked_text(record.get(text_key), text_key, record)


def _checked_text(value: object, text_key: str, known: Sequence[str] | dict[str, object]) -> str:
    if not isinstance(value, str):
        if value is None and text_key not in known:
            raise ValueError(f"no key {text_key!r}; there are: {', '.join(known)} (--text-key chooses)")
        raise ValueError(f"{text_key!r} is {'null' if value is None else type(value).__name__}, not text")
    value.encode("utf-8")  # JSON can escape half of a surrogate pair
    return value


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of the line is no UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "the text holds half of a surrogate pair, which is no Unicode text"
    return str(error)


def _line_number(piece: Piece, number: int) -> int:
    """Line of the file, 1-based, for the `number`-th line that begins in the piece. Counts only when it is asked."""
    if not piece.start:
        return number
    lines, last, left = 0, b"\n", piece.start
    with open(piece.path, "rb") as file:
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            lines, last, left = lines + chunk.count(b"\n"), chunk[-1:], left - len(chunk)
    return lines + number + (last != b"\n")


def _decompressed(raw: BinaryIO, path: str) -> _Readable:
    if path.endswith(".gz"):
        import gzip

        return _Guarded(gzip.GzipFile(fileobj=raw), path)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw, path), _CHUNK_BYTES)
    return raw


class _Readable(Protocol):
    def read(self) -> bytes: ...

    def readline(self) -> bytes: ...


class _Guarded:
    """A gzip file whose errors name the file."""

    def __init__(self, file: _Readable, path: str):
        self._file, self._path = file, path

    def _call(self, method: Callable[[], bytes]) -> bytes:
        import zlib

        try:
            return method()
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{self._path} is truncated or damaged: {error}", "copy it again") from error

    def read(self) -> bytes:
        return self._call(self._file.read)

    def readline(self) -> bytes:
        return self._call(self._file.readline)


class _ZstdReader(io.RawIOBase):
    """Frames of Zstandard, one after the other. (zstandard's own stream reader takes a truncated file for its end.)"""

    def __init__(self, raw: BinaryIO, path: str):
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._raw, self._path = raw, path
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._raw.read(_CHUNK_BYTES // 8)
            if not data:
                if self._frame is not None:
                    raise DataError(f"{self._path} is truncated: its last frame does not end", "copy it again")
                return 0
            try:
                self._ready = self._decompress(data)
            except self._error as error:
                raise DataError(f"{self._path} is damaged: {error}", "copy it again") from error
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            frame = self._frame or self._decompressor.decompressobj()
            parts.append(frame.decompress(data))
            data, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return b"".join(parts)


def _parquet_file(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file, or a damaged one: {error}") from error


def _parquet_pieces(file: InputFile, text_key: str, split_bytes: int) -> Iterator[Piece]:
    parquet = _parquet_file(file.path)
    if text_key not in parquet.schema_arrow.names:
        raise DataError(
            f"{file.path} has no column {text_key!r}; it has: {', '.join(parquet.schema_arrow.names)}",
            "choose the column of the text with --text-key",
        )
    num_groups, start, size = parquet.num_row_groups, 0, 0
    for group in range(num_groups):
        size += parquet.metadata.row_group(group).total_byte_size
        if size >= split_bytes or group == num_groups - 1:
            yield Piece(file.path, "parquet", start, group + 1, size)
            start, size = group + 1, 0


def _read_parquet(piece: Piece, text_key: str, on_bad: OnBad) -> Iterator[Document]:
    parquet = _parquet_file(piece.path)
    groups = range(piece.start, piece.stop)
    num_rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    first_row = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.start))
    row = 0
    for values in _parquet_batches(parquet, piece, text_key):
        for value in values:
            try:
                text = _checked_text(value, text_key, [text_key])
            except ValueError as error:
                on_bad(f"{piece.path}: row {first_row + row}", _reason(error))
                text = ""
            row += 1
            yield Document(text, piece.num_bytes * row // num_rows)


def _parquet_batches(parquet: Any, piece: Piece, text_key: str) -> Iterator[list[object]]:
    import pyarrow

    groups = list(range(piece.start, piece.stop))
    try:
        for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS, row_groups=groups, columns=[text_key]):
            yield batch.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{piece.path} is damaged: {error}", "copy it again") from error
