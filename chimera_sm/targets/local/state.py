"""`state.json`: what the driver says about the run, for every other process to read."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from chimera_sm.runs.status import ENDED
from chimera_train.config import decode, encode

from .process import ProcessId

STATE_FILE = "state.json"


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
    updated: float = 0.0
    """Seconds since the epoch."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def driver_died(self) -> bool:
        return not self.ended and not self.driver.alive


def read_state(run: Path) -> LocalState | None:
    """The state, or None where the run was never started."""
    try:
        return decode(LocalState, json.loads((run / STATE_FILE).read_bytes()))
    except FileNotFoundError:
        return None


def write_state(run: Path, state: LocalState) -> None:
    """Replace the file: a reader sees the old one or the new one, whole."""
    part = run / f".{STATE_FILE}.{os.getpid()}"
    data = {**encode(state), "updated": time.time()}
    part.write_text(json.dumps(data, indent=2) + "\n")
    part.replace(run / STATE_FILE)
