"""The folder of a run's checkpoints: what is complete, what is torn, what may go. Standard library only.

SageMaker copies files of /opt/ml/checkpoints to S3 in any order, puts `<file>.sagemaker-uploading` and
`<file>.sagemaker-uploaded` beside them, deletes in S3 what is deleted here, and restores the union of all hosts' files
on every host (developer guide, model-train-storage; markers as transformers#21614 and sagemaker-xgboost-container meet
them). Hence: nothing is renamed or written twice, and only a manifest that names every file makes a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import CheckpointError
from .manifest import MANIFEST, Checksum, FileEntry, Manifest, ManifestError, RankManifest, seal, unseal

UPLOADING = ".sagemaker-uploading"
UPLOADED = ".sagemaker-uploaded"
_FOLDER = re.compile(r"step-(\d+)(?:\.(\d+))?")
_READ_BYTES = 8 << 20
_Names = list[str]  # `CheckpointStore.list` hides the builtin in the class body


def write_once(path: Path, data: bytes) -> None:
    """Create `path` with `data`, durably; FileExistsError where it is there already."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (POSIX: a file's fsync does not cover its directory entry)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` durably; many ranks may do so at once."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)


def folder_name(step: int, attempt: int) -> str:
    """`step-<n>`, and `step-<n>.<k>` for a later attempt at the same step."""
    return f"step-{step}.{attempt}" if attempt else f"step-{step}"


def position(name: str) -> tuple[int, int]:
    """(step, attempt) of a folder name: the order of checkpoints."""
    found = _FOLDER.fullmatch(name)
    assert found is not None, name
    return int(found[1]), int(found[2] or 0)


@dataclass(frozen=True)
class Complete:
    """A checkpoint whose every file is there with its size; contents are checked by `CheckpointStore.verify`."""

    name: str
    path: Path
    manifest: Manifest
    files: tuple[FileEntry, ...]
    """Every file but the manifests, the metadata file included."""
    digest: str
    """SHA-256 of `manifest.json`: the checkpoint's identity, the same on every host."""


@dataclass(frozen=True)
class Torn:
    """A folder that is no checkpoint, and why."""

    name: str
    path: Path
    reason: str
    committed: bool
    """It has a `manifest.json`: it was complete once, or is damaged, or has not fully arrived."""


@dataclass(frozen=True)
class Listing:
    complete: tuple[Complete, ...]
    """Newest first."""
    torn: tuple[Torn, ...]
    """Newest first."""


class CheckpointStore:
    """Checkpoints under one folder. `shared`: every host sees this very folder; else each host has its own."""

    def __init__(self, root: Path, *, shared: bool):
        self.root = root
        self.shared = shared

    def names(self) -> _Names:
        """Folders of checkpoints, complete or not, newest first."""
        if not self.root.is_dir():
            return []
        found = [e.name for e in os.scandir(self.root) if _FOLDER.fullmatch(e.name) and e.is_dir()]
        return sorted(found, key=position, reverse=True)

    def list(self) -> Listing:
        """All folders, sorted by whether they hold a complete checkpoint (names and sizes; contents by `verify`)."""
        complete, torn = [], []
        for name in self.names():
            found = self.examine(name)
            if isinstance(found, Complete):
                complete.append(found)
            else:
                torn.append(found)
        return Listing(tuple(complete), tuple(torn))

    def open(self, step: int | Literal["newest"] = "newest") -> Complete:
        """The newest complete checkpoint, or the newest attempt at `step`; CheckpointError where there is none."""
        listing = self.list()
        for found in listing.complete:
            if step == "newest" or found.manifest.step == step:
                return found
        wanted = "" if step == "newest" else f" of step {step}"
        torn = [f"{t.name}: {t.reason}" for t in listing.torn if step == "newest" or position(t.name)[0] == step]
        steps = [str(c.manifest.step) for c in listing.complete]
        details = torn + ([f"complete steps here: {', '.join(steps)}"] if steps else [])
        raise CheckpointError("\n  ".join([f"no complete checkpoint{wanted} in {self.root}", *details]))

    def examine(self, name: str) -> Complete | Torn:
        """Whether the folder `name` holds all that its manifests name, with the right sizes."""
        path = self.root / name
        try:
            data = (path / MANIFEST).read_bytes()
        except FileNotFoundError:
            return Torn(name, path, f"no {MANIFEST}: its save did not finish, or it is being deleted", False)
        except OSError as error:
            return Torn(name, path, f"{MANIFEST} cannot be read ({error.strerror})", True)
        try:
            manifest = unseal(Manifest, data)
        except ManifestError as error:
            return Torn(name, path, f"{MANIFEST} {error}", True)
        files = [manifest.metadata]
        try:
            for entry in manifest.rank_manifests:
                files += _read_rank_manifest(path, entry.name, entry.sha256).files
            for file in files:
                _check_size(path, file)
        except ManifestError as error:
            return Torn(name, path, str(error), True)
        return Complete(name, path, manifest, tuple(files), hashlib.sha256(data).hexdigest())

    def verify(self, name: str, files: Collection[FileEntry], *, part: int = 0, parts: int = 1) -> _Names:
        """Read every byte of this reader's share of `files`; returns what is wrong, one sentence a file.

        `parts` readers that call this with the same `files` and each its own `part` read each file once.
        """
        problems = []
        for file in share(files, part, parts):
            try:
                if checksum_of(self.root / name / file.name, file.checksum) != file.checksum:
                    problems.append(f"{file.name} does not match its checksum {file.checksum}")
            except (OSError, ManifestError) as error:
                problems.append(f"{file.name} cannot be read ({error})")
        return problems

    def next_attempt(self, step: int) -> int:
        """The lowest attempt number at `step` above all that stand here. Hosts take the highest of theirs."""
        attempts = [attempt for at, attempt in map(position, self.names()) if at == step]
        return max(attempts, default=-1) + 1

    def new_folder(self, step: int) -> Path:
        """Make the folder of a new attempt at `step`, for a single writer. Many agree on a number first."""
        path = self.root / folder_name(step, self.next_attempt(step))
        make_folder(path)
        return path

    def commit(self, folder: Path, manifest: Manifest) -> None:
        """Write `manifest.json`, durably. All that it names must be durable already."""
        write_once(folder / MANIFEST, seal(manifest))

    def prune(self, keep_last: int) -> _Names:
        """Delete what `victims` names, where one reader sees everything. Returns the names that are gone."""
        names = self.names()
        complete = [c.name for c in self.list().complete]
        gone = victims(names, complete, {n for n in names if self.uploading(n)}, keep_last)
        for name in gone:
            self.retract(name)
        return [name for name in gone if self.remove(name)]

    def uploading(self, name: str) -> bool:
        """Whether SageMaker is uploading a file of the folder `name` at this moment."""
        return any(child.name.endswith(UPLOADING) for child in _children(self.root / name))

    def retract(self, name: str) -> None:
        """Delete the global manifest, so that a half-deleted folder is no checkpoint for any reader."""
        (self.root / name / MANIFEST).unlink(missing_ok=True)

    def remove(self, name: str) -> bool:
        """Delete a folder, its manifest first; False where files stay because one of them is being uploaded."""
        self.retract(name)
        path = self.root / name
        if self.uploading(name):
            return False
        for child in _children(path):
            child.unlink(missing_ok=True)
        if path.is_dir():
            path.rmdir()
        return True


def victims(names: Collection[str], complete: Collection[str], uploading: Collection[str], keep_last: int) -> list[str]:
    """What pruning deletes, oldest first: all but the newest `keep_last` complete checkpoints, and torn folders older
    than the newest complete one.

    A folder of which a file is being uploaded stays. So does every complete one while a kept one other than the newest
    is being uploaded: what is in S3 would else be the newest, perhaps half there, and nothing to fall back on.
    """
    newest_first = sorted(complete, key=position, reverse=True)
    if not newest_first:
        return []
    kept = set(newest_first[:keep_last])
    if kept.intersection(uploading) - {newest_first[0]}:
        kept = set(newest_first)
    old = [n for n in names if position(n) < position(newest_first[0]) and n not in kept and n not in uploading]
    return sorted(old, key=position)


def share(files: Collection[FileEntry], part: int, parts: int) -> list[FileEntry]:
    """The files that reader `part` of `parts` checks: largest first, each to the reader with least to do."""
    load = [0] * parts
    mine = []
    for file in sorted(files, key=lambda f: (-f.size, f.name)):
        reader = load.index(min(load))
        load[reader] += file.size
        if reader == part:
            mine.append(file)
    return mine


def checksum_of(path: Path, expected: str) -> str:
    """The checksum of a file, by the algorithm that `expected` names."""
    algorithm = expected.partition(":")[0]
    if algorithm != Checksum.ALGORITHM:
        raise ManifestError(f"checksum algorithm {algorithm!r} is not known to this release")
    checksum = Checksum()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            checksum.update(block)
    return checksum.text()


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _children(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from list(path.iterdir())


def _read_rank_manifest(path: Path, name: str, sha256: str) -> RankManifest:
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise ManifestError(f"{name} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ManifestError(f"{name} is not the one that {MANIFEST} names")
    try:
        return unseal(RankManifest, data)
    except ManifestError as error:
        raise ManifestError(f"{name} {error}") from None


def _check_size(path: Path, file: FileEntry) -> None:
    try:
        size = (path / file.name).stat().st_size
    except OSError as error:
        raise ManifestError(f"{file.name} cannot be read ({error.strerror})") from None
    if size != file.size:
        raise ManifestError(f"{file.name} has {size} bytes instead of {file.size}")
