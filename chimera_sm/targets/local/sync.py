"""What SageMaker does with /opt/ml/checkpoints, done here: uploads, deletions, and the union restored on every host.

Like an S3 PUT, a copy appears whole: it is made beside the store and renamed into it, and only of a file that did not
change meanwhile. `<file>.sagemaker-uploading` and `.sagemaker-uploaded` stand beside a file as they do on SageMaker.
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
        store.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._uploads, ignore_errors=True)
        self._uploads.mkdir()
        if self._ledger_file.exists():
            saved = json.loads(self._ledger_file.read_text())
            self._known |= {n: {f: (s[0], s[1]) for f, s in saved.get(n, {}).items()} for n in hosts}

    def scan(self, settle_s: float = SETTLE_S) -> list[str]:
        """Upload what is new on any host and delete in the store what a host deleted. Returns what went wrong."""
        problems: list[str] = []
        before = json.dumps(self._known, sort_keys=True)
        for name, folder in self._hosts.items():
            if not folder.is_dir():  # a lost host is not a host that deleted everything
                self._known[name] = {}
                continue
            found = _files(folder)
            for path, signature in sorted(found.items(), key=lambda item: (item[1][1], item[0])):
                settled = time.time_ns() - signature[1] >= settle_s * 1e9
                if settled and self._known[name].get(path) != signature:
                    try:
                        self._upload(name, path, signature)
                    except OSError as error:
                        problems.append(f"{name}: {path} was not copied: {error.strerror}")
            for path in self._known[name].keys() - found.keys():
                self._delete(path)
                del self._known[name][path]
        if json.dumps(self._known, sort_keys=True) != before:
            self._write_ledger()
        return problems

    def restore(self) -> int:
        """Give every host the union of what the store holds, as before a (re)start; returns the number of files.

        Call `scan(0)` first. A file that another host deleted goes; one that never reached the store stays.
        """
        stored = _files(self._store)
        for name, folder in self._hosts.items():
            folder.mkdir(parents=True, exist_ok=True)
            for marker in [p for suffix in (UPLOADING, UPLOADED) for p in folder.rglob(f"*{suffix}")]:
                marker.unlink(missing_ok=True)
            for path in self._known[name].keys() - stored.keys():
                (folder / path).unlink(missing_ok=True)
            known = {}
            for path in stored:
                file = folder / path
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    _link(self._store / path, file)
                known[path] = _signature(file)
            self._known[name] = known
            _remove_empty_folders(folder)
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
            uploading.replace(file.with_name(file.name + UPLOADED))
        except FileNotFoundError:  # deleted while it was copied: the next scan sees that
            pass
        finally:
            part.unlink(missing_ok=True)
            uploading.unlink(missing_ok=True)

    def _delete(self, path: str) -> None:
        file = self._store / path
        file.unlink(missing_ok=True)
        for folder in file.relative_to(self._store).parents[:-1]:
            try:
                (self._store / folder).rmdir()
            except OSError:
                break

    def _write_ledger(self) -> None:
        part = self._uploads / "ledger"
        part.write_text(json.dumps(self._known))
        part.replace(self._ledger_file)


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
