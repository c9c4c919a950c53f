"""torch.distributed.checkpoint's file system storage, held to the rules of the store: no file is renamed or written
twice, every file is synced, and its checksum is taken of the bytes on their way to it.

Torch's own writer truncates what is there, renames its metadata into place and keeps no digests.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .manifest import METADATA, Checksum, FileEntry
from .store import make_folder, sync_folder


class _ChecksumStream:
    """The part of a binary file that torch's writer uses, with a checksum of all that passes."""

    def __init__(self, raw: IO[bytes], on_write: Callable[[], None]):
        self._raw = raw
        self._on_write = on_write
        self.size = 0
        self.checksum = Checksum()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._raw.write(data)
        except OSError as error:
            self.error = error
            raise
        self.checksum.update(data)
        self.size += written
        self._on_write()
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        self._raw.flush()  # fsync acts on the descriptor: what Python still holds would be missed
        return self._raw.fileno()

    def close(self) -> None:
        """Torch closes inside the `with`; the file is closed where it was opened."""


class _OnceFileSystem(FileSystem):
    """Creates files and never opens one for writing again; records what was written, and a write's error."""

    def __init__(self, on_write: Callable[[], None]):
        self._on_write = on_write
        self.files: list[FileEntry] = []
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        path = Path(path)
        with path.open("xb") as raw:
            stream = _ChecksumStream(raw, self._on_write)
            try:
                yield stream
            finally:
                self.error = stream.error
            os.fsync(stream.fileno())
        sync_folder(path.parent)
        self.files.append(FileEntry(path.name, stream.size, stream.checksum.text()))


class OnceWriter(FileSystemWriter):
    """Writes one data file a rank (`__<rank>_0.distcp`) and, on rank 0, the metadata, into a new folder.

    `files` then lists what this process wrote. `on_write` is called after every write to a file.
    """

    def __init__(self, folder: Path, on_write: Callable[[], None] = lambda: None):
        # One thread: torch drops the exceptions of the others. We sync ourselves, before the checksum is final.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.fs: _OnceFileSystem = _OnceFileSystem(on_write)
        self._dtypes: tuple[str, ...] = ()

    @property
    def files(self) -> list[FileEntry]:
        return self.fs.files

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_folder(Path(self.path))  # torch would also look for its own name of the metadata in it
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not plan.items:  # a rank whose shards are all empty: no empty file
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        try:
            written = super().write_data(plan, planner)
        except Exception:
            # torch.save hides a full disk behind its own complaint about the unfinished archive.
            if self.fs.error is not None:
                raise self.fs.error from None
            raise
        dtypes = {str(i.tensor_data.properties.dtype).removeprefix("torch.") for i in plan.items if i.tensor_data}
        (file,) = self.fs.files
        self.fs.files[:] = [FileEntry(file.name, file.size, file.checksum, tuple(sorted(dtypes)))]
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for rank_results in results for r in rank_results}
        metadata.storage_meta = self.storage_meta()
        with self.fs.create_stream(Path(self.path) / METADATA, "wb") as stream:
            pickle.dump(metadata, stream)


class OnceReader(FileSystemReader):
    """Reads what `OnceWriter` wrote. The metadata is read once a reader."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with (Path(self.path) / METADATA).open("rb") as stream:
                self._metadata = pickle.load(stream)
        return self._metadata
