"""Processes that outlive the one that asks: who they are, and whether they still run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process and when it started: a number alone may belong to another by now."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, _started(pid) or "unknown")

    @property
    def alive(self) -> bool:
        """Still running (a zombie is not)."""
        return _started(self.pid) == self.started


def _started(pid: int) -> str | None:
    """A word that no other process of this number has, or None where no process of this number runs."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"
    listed = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return None if not listed or listed.startswith("Z") else listed.partition(" ")[2].strip()


def signal_process(process: ProcessId, number: int) -> bool:
    """Send a signal to the process, if it still runs; False where it does not."""
    if not process.alive:
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """In a child, before exec: Linux sends it SIGTERM when the process that started it dies, however that dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
