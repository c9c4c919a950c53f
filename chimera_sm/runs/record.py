"""The record of a launch: a folder that another process, or another day, can pick up.

    runs/<run-id>/launch.lock      what was launched: resolved recipe, hashes, image, git commit, artefacts' digests
    runs/<run-id>/artifacts/…      the bytes that were sent
    runs/<run-id>/resumes/<n>/…    the same two of the n-th resume that changed the recipe; the newest counts, but for
                                   those with a file `withdrawn`: the run could not go on with them
    runs/<run-id>/…                what the target keeps (the local target: hosts, logs, state)

A `launch.lock` is written, once, before anything is submitted, and never changed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chimera_sm.errors import UsageError
from chimera_sm.paths import runs_dir
from chimera_train.config import nearest

LOCK_VERSION = 1
LOCK_FILE = "launch.lock"
RESUMES = "resumes"
WITHDRAWN = "withdrawn"


def mint_run_id(name: str) -> str:
    """`<name>-<UTC time>-<6 hex>`: sorts by time, fits SageMaker's job names (at most 63 characters)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{_safe(name)[:38].rstrip('-')}-{stamp}-{secrets.token_hex(3)}"


def dry_run_id(name: str, recipe_hash: str) -> str:
    """A dry run's id: the same recipe gives the same one."""
    return f"{_safe(name)[:38].rstrip('-')}-dryrun-{recipe_hash[:12]}"


def check_run_id(run_id: str) -> str:
    """The id, or UsageError: it names a folder here and a training job at AWS (at most 63 characters there)."""
    if len(run_id) > 63 or not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", run_id):
        raise UsageError(f"run id {run_id!r} is not 1 to 63 letters, digits and inner hyphens")
    if run_id == "last":
        raise UsageError("run id 'last' always means the newest run", fix="take another one")
    return run_id


def _safe(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "run"


def _write(folder: Path, lock: Mapping[str, Any], artifacts: Mapping[str, bytes]) -> None:
    """Artefacts first, then the lock, whole or not at all: a folder without one does not exist for a reader."""
    for name, content in artifacts.items():
        file = folder / "artifacts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    part = folder / f".{LOCK_FILE}.part"
    with part.open("w") as stream:
        stream.write(json.dumps({"lock_version": LOCK_VERSION, **lock}, indent=2, sort_keys=True) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(folder / LOCK_FILE)


@dataclass(frozen=True)
class RunRecord:
    """One run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, run_id: str, lock: Mapping[str, Any], artifacts: Mapping[str, bytes]) -> RunRecord:
        """Write the record, or raise FileExistsError: a record is never overwritten."""
        path = runs_dir().resolve() / run_id
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                raise
            raise UsageError(
                f"{path.parent} is no folder", fix="CHIMERA_RUNS names the folder of the records"
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot write the run's record to {path.parent}: {error.strerror}",
                fix="CHIMERA_RUNS names the folder of the records",
            ) from None
        _write(path, {"run_id": run_id, **lock}, artifacts)
        return cls(path)

    def amend(self, lock: Mapping[str, Any], artifacts: Mapping[str, bytes]) -> None:
        """Record a resume with another recipe. What was recorded before stays as it is."""
        number = 1 + max((int(p.name) for p in (self.path / RESUMES).glob("[0-9]*")), default=0)
        folder = self.path / RESUMES / str(number)
        folder.mkdir(parents=True)
        _write(folder, {**self.lock, **lock}, artifacts)

    def withdraw(self, folder: Path) -> None:
        """From here on the resume that was recorded in `folder`, a `current` of this record, does not count."""
        assert folder.parent == self.path / RESUMES, folder
        (folder / WITHDRAWN).touch()

    @property
    def current(self) -> Path:
        """The folder of what counts: the newest resume that changed the recipe and was not withdrawn, or the launch."""
        resumes = [p.parent for p in (self.path / RESUMES).glob(f"[0-9]*/{LOCK_FILE}")]
        resumes = [folder for folder in resumes if not (folder / WITHDRAWN).exists()]
        return max(resumes, key=lambda p: int(p.name), default=self.path)

    @property
    def artifacts(self) -> Path:
        """Folder of the bytes that were sent."""
        return self.current / "artifacts"

    @classmethod
    def find(cls, run_id: str) -> RunRecord:
        """The record of `run_id` (a unique beginning is enough, `last` is the newest), or UsageError."""
        known = cls.list_ids()
        if run_id == "last" and known:
            return cls(runs_dir().resolve() / known[-1])
        matches = [k for k in known if k == run_id] or [k for k in known if k.startswith(run_id)]
        if len(matches) == 1:
            return cls(runs_dir().resolve() / matches[0])
        if matches:
            raise UsageError(f"run {run_id!r} is ambiguous: {', '.join(matches)}")
        hint = nearest(run_id, known)
        raise UsageError(
            f"no run {run_id!r} in {runs_dir()}",
            fix=f"did you mean {hint}?" if hint else "CHIMERA_RUNS names the folder of the records",
        )

    @classmethod
    def list_ids(cls) -> list[str]:
        """Ids of all records, oldest first."""
        folder = runs_dir()
        locks = list(folder.glob(f"*/{LOCK_FILE}")) if folder.is_dir() else []
        return [p.parent.name for p in sorted(locks, key=lambda p: (p.stat().st_mtime_ns, p.parent.name))]

    @property
    def lock(self) -> dict[str, Any]:
        """What was launched, or resumed with another recipe."""
        file = self.current / LOCK_FILE
        try:
            data = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"the record of run {self.run_id} cannot be read: {file}: {error}") from None
        if not isinstance(data, dict) or "target" not in data:
            raise UsageError(f"the record of run {self.run_id} cannot be read: {file} is no launch record")
        return data
