"""What SageMaker does with /opt/ml/checkpoints, done here: uploads, deletions, and the union restored on every host.

Like an S3 PUT, a copy appears whole: it is made beside the store and renamed into it, and only of a file that did not
change meanwhile. `<file>.sagemaker-uploading` and `.sagemaker-uploaded` stand beside a file as they do on SageMaker.

A file that is gone was deleted only if a host deleted it while it ran: `scan` passes that on. What is missing when no
host runs was lost, on whichever side, and is given back: `gather`, then `restore`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

UPLOADING = ".sagemaker-uploading"
UPLOADED = ".sagemaker-uploaded"
SETTLE_S = 0.5
"""A file that changed more recently may still be being written."""

Signature = tuple[int, int]
"""Size and mtime (ns) of a file as it was copied."""


class CheckpointSync:
    """One store for the folders of all hosts, without a suffix a host, as CheckpointConfig.S3Uri is."""

    def __init__(self, hosts: Mapping[str, Path], store: Path):
        self._hosts = dict(hosts)
        self._store = store
        self._uploads = store.with_name(f"{store.name}.uploads")
        self._ledger_file = store.with_name(f"{store.name}.ledger.json")
        self._known: dict[str, dict[str, Signature]] = {name: {} for name in hosts}
        """By host and relative path: what the store has of it."""
        self._deleted: set[str] = set()
        """What a running host deleted and others may still hold; until the next restore."""
        store.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._uploads, ignore_errors=True)
        self._uploads.mkdir()
        self._read_ledger()

    def scan(self, settle_s: float = SETTLE_S) -> list[str]:
        """Upload what is new on any host and delete in the store what a host deleted. Returns what went wrong.

        Only for hosts that run, or have just ended: what is gone counts as deleted by them.
        """
        return self._pass(settle_s, running=True)

    def gather(self) -> list[str]:
        """Upload what the store lacks, and delete nothing: for hosts that do not run. Returns what went wrong."""
        return self._pass(0.0, running=False)

    def _pass(self, settle_s: float, *, running: bool) -> list[str]:
        problems: list[str] = []
        before = self._ledger()
        stored = _files(self._store)
        for name, folder in self._hosts.items():
            known = self._known[name]
            if not folder.is_dir():  # a lost host is not a host that deleted everything
                known.clear()
                continue
            found = _files(folder)
            for path, signature in sorted(found.items(), key=lambda item: (item[1][1], item[0])):
                if not running and path not in known and _is_copy(stored.get(path), signature):
                    known[path] = signature
                elif known.get(path) == signature and (path in stored or path in self._deleted):
                    continue
                elif time.time_ns() - signature[1] >= settle_s * 1e9:
                    try:
                        self._upload(name, path, signature)
                    except OSError as error:
                        problems.append(f"{name}: {path} was not copied: {error.strerror}")
            for path in known.keys() - found.keys():
                if running:
                    self._delete(path)
                del known[path]
        if self._ledger() != before:
            problems += self._write_ledger()
        return problems

    def restore(self) -> int:
        """Give every host the union of what the store holds, as before a (re)start; returns the number of files.

        Call `gather` first. A file that a running host deleted goes from the others too; one that never reached the
        store stays. Raises OSError where a host's folder cannot be written.
        """
        stored = _files(self._store)
        for name, folder in self._hosts.items():
            folder.mkdir(parents=True, exist_ok=True)
            for marker in [p for suffix in (UPLOADING, UPLOADED) for p in folder.rglob(f"*{suffix}")]:
                marker.unlink(missing_ok=True)
            for path in self._deleted & (self._known[name].keys() - stored.keys()):
                (folder / path).unlink(missing_ok=True)
            known = {}
            for path in stored:
                file = folder / path
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    _link(self._store / path, file)
                    known[path] = _signature(file)
                elif path in self._known[name]:
                    known[path] = self._known[name][path]
            self._known[name] = known
            _remove_empty_folders(folder)
        self._deleted.clear()
        self._write_ledger()
        return len(stored)

    def _upload(self, name: str, path: str, signature: Signature) -> None:
        file = self._hosts[name] / path
        uploading = file.with_name(file.name + UPLOADING)
        part = self._uploads / "part"
        try:
            uploading.touch()
            shutil.copyfile(file, part)
            if _signature(file) == signature:
                target = self._store / path
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
                self._known[name][path] = signature
                self._deleted.discard(path)
            uploading.replace(file.with_name(file.name + UPLOADED))
        except FileNotFoundError:  # deleted while it was copied: the next scan sees that
            pass
        finally:
            part.unlink(missing_ok=True)
            uploading.unlink(missing_ok=True)

    def _delete(self, path: str) -> None:
        self._deleted.add(path)
        file = self._store / path
        file.unlink(missing_ok=True)
        for folder in file.relative_to(self._store).parents[:-1]:
            try:
                (self._store / folder).rmdir()
            except OSError:
                break

    def _ledger(self) -> str:
        return json.dumps({"hosts": self._known, "deleted": sorted(self._deleted)}, sort_keys=True)

    def _read_ledger(self) -> None:
        """What earlier drivers knew. Without it, or with a damaged one, what is there is compared anew."""
        try:
            saved = json.loads(self._ledger_file.read_bytes())
            hosts = {name: {f: (int(s[0]), int(s[1])) for f, s in saved["hosts"][name].items()} for name in self._hosts}
            self._known, self._deleted = hosts, {str(path) for path in saved["deleted"]}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return

    def _write_ledger(self) -> list[str]:
        """Returns what went wrong: the ledger saves copies, and a run can do without."""
        part = self._uploads / "ledger"
        try:
            part.write_text(self._ledger())
            part.replace(self._ledger_file)
        except OSError as error:
            return [f"{self._ledger_file.name} was not written: {error.strerror}"]
        return []


def _files(folder: Path) -> dict[str, Signature]:
    """Relative path → signature of every file, markers left out."""
    found = {}
    for path in _walk(folder):
        if not path.name.endswith((UPLOADING, UPLOADED)):
            try:
                found[str(path.relative_to(folder))] = _signature(path)
            except FileNotFoundError:  # deleted meanwhile
                continue
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root, name)


def _signature(file: Path) -> Signature:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _is_copy(stored: Signature | None, signature: Signature) -> bool:
    """Where no ledger tells: a copy of the same size that is no older was made of this file, or of a peer's."""
    return stored is not None and stored[0] == signature[0] and stored[1] >= signature[1]


def _link(source: Path, target: Path) -> None:
    """A second name for the same bytes (nothing in a checkpoint is written twice), or a copy across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _remove_empty_folders(folder: Path) -> None:
    for root, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            try:
                Path(root, name).rmdir()
            except OSError:
                continue
