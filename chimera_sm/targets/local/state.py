"""`state.json`: what the driver says about the run, for every other process to read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from chimera_sm.errors import UsageError
from chimera_sm.runs.status import ENDED
from chimera_train.config import decode, encode

from .process import ProcessId

STATE_FILE = "state.json"
ROOM = 4096
"""Bytes of blanks at the end of the file: what a longer reason needs when the disk is full."""
READS = 3
"""A reader that meets a write in place (full disk) looks again."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    process: ProcessId | None = None
    exit_code: int | None = None
    """Of the container; negative where a signal killed launch.py itself."""


@dataclass(frozen=True, kw_only=True)
class LocalState:
    state: str
    """Of `runs.status.STATES`, as the driver saw it last."""
    driver: ProcessId
    attempt: int
    """Starts of the hosts so far, over all resumes."""
    reason: str = ""
    exit_code: int | None = None
    """What the run as a whole ended with (the codes of the container contract)."""
    hosts: dict[str, HostState] = field(default_factory=dict)
    saved_step: int | None = None
    """Newest complete checkpoint that a driver of this run has seen."""
    updated: float = 0.0
    """Seconds since the epoch."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def driver_died(self) -> bool:
        return not self.ended and not self.driver.alive


def read_state(run: Path) -> LocalState | None:
    """The state, or None where the run was never started. Raises UsageError for a file that is damaged."""
    file = run / STATE_FILE
    problem: Exception | None = None
    for _ in range(READS):
        try:
            return decode(LocalState, json.loads(file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            problem = error
            time.sleep(0.02)
    raise UsageError(
        f"the state of run {run.name} cannot be read: {file}: {str(problem).splitlines()[0]}",
        fix=f"delete the file and launch again with --run-id {run.name}: the checkpoints in {run / 's3'} are kept",
    )


def write_state(run: Path, state: LocalState) -> None:
    """Replace the file: a reader sees the old one or the new one, whole. Where the disk is full it is overwritten in
    the room that it has. Raises OSError where that fails too."""
    file = run / STATE_FILE
    part = run / f".{STATE_FILE}.{os.getpid()}"
    content = (json.dumps({**encode(state), "updated": time.time()}, indent=2) + "\n").encode()
    try:
        with part.open("wb") as stream:
            stream.write(content + b" " * (ROOM - 1) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if not file.is_file() or file.stat().st_size < len(content):
            raise
        with file.open("r+b", buffering=0) as stream:
            stream.write(content.ljust(file.stat().st_size))
