"""The failure file: what the service shows as the reason of a failed job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from chimera_train.config.contract import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_RETRY,
    EXIT_STOPPED,
    FAILURE_LIMIT,
)

HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory? The kernel kills so; see instances.*, data.prefetch_batches",
    signal.SIGSEGV: "a crash in native code; the last lines of its log may name the library",
    signal.SIGBUS: "shared memory or a mapped file gave way: /dev/shm too small, or a shard was truncated",
    signal.SIGABRT: "aborted itself: NCCL's watchdog after a hang, or a failed assertion on the device",
    signal.SIGILL: "a library was built for another CPU",
    signal.SIGTERM: "somebody sent it past the supervisor",
}


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended. `code` is as `subprocess` has it: negative for a signal."""

    rank: int
    code: int
    time: float
    """Seconds since the epoch; the worker's own report of its error where there is one."""
    message: str = ""
    traceback: str = ""
    reported: bool = False
    """The message is the worker's own."""

    @property
    def signal(self) -> int | None:
        """The signal that killed it, told directly or as a shell does (128 + number)."""
        if self.code < 0:
            return -self.code
        return self.code - 128 if self.code - 128 in HINTS and self.code != EXIT_STOPPED else None

    def host_exit(self, asked_to_stop: bool) -> int:
        """The container's exit code that this end calls for."""
        if self.code in (EXIT_FINISHED, EXIT_STOPPED, EXIT_RETRY):
            return self.code
        if self.signal is None:
            return EXIT_FAILED
        # A worker that was still starting when it was asked to stop has no handler yet, and nothing to save.
        return EXIT_STOPPED if asked_to_stop and self.signal == signal.SIGTERM else EXIT_RETRY


def first_failure(ends: Iterable[WorkerEnd], asked_to_stop: bool) -> WorkerEnd | None:
    """The end that explains the others.

    Workers that lose a peer leave with EXIT_RETRY, often reaped before the peer itself: another kind of failure
    explains theirs. Among equals the earliest counts.
    """
    failed = [end for end in ends if end.host_exit(asked_to_stop) in (EXIT_FAILED, EXIT_RETRY)]
    return min(failed, key=lambda end: (end.code == EXIT_RETRY, end.time, end.rank), default=None)


def read_error_file(path: Path, end: WorkerEnd) -> WorkerEnd:
    """`end` with what the worker wrote about its error; as it was where the file is missing or torn."""
    try:
        report = json.loads(path.read_text())
        return WorkerEnd(
            end.rank,
            end.code,
            float(report["time"]),
            str(report["message"]),
            str(report.get("traceback", "")),
            reported=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return end


def describe(end: WorkerEnd, host: str, last_lines: Iterable[str]) -> str:
    """Text of the failure file: the message, then as many last lines of the traceback as fit; of the log, where the
    worker told nothing."""
    where = f"rank {end.rank} on {host}"
    if end.signal is not None:
        hint = HINTS.get(end.signal)
        head = f"{where} was killed by {signal_name(end.signal)}" + (f" ({hint})" if hint else "")
    elif end.message:
        head = f"{where}: {end.message} (exit code {end.code})"
    else:
        head = f"{where} left with exit code {end.code} and no report"
    detail = end.traceback if end.reported else "".join(last_lines)
    return shorten(head, detail)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def shorten(head: str, detail: str) -> str:
    """At most FAILURE_LIMIT characters: the head, then the last lines of the detail that fit, each whole."""
    head, detail = head.strip(), detail.strip()
    if len(head) > FAILURE_LIMIT:
        room = FAILURE_LIMIT - len(" …")
        return (head[: room + 1].rpartition(" ")[0] or head[:room]) + " …"
    room = FAILURE_LIMIT - len(head) - 1
    if len(detail) > room:
        lines = detail[len(detail) - room + 1 :].partition("\n")[2]  # beside an ellipsis and its end of line
        detail = f"…\n{lines}" if lines else ""
    return f"{head}\n{detail}" if detail else head


def write_report(path: Path, end: WorkerEnd) -> None:
    """The same failure for programs: who compares the hosts of a job applies the rule of `first_failure` to these."""
    path.write_text(json.dumps({"rank": end.rank, "code": end.code, "time": end.time, "message": end.message}) + "\n")


def write_failure(path: Path, text: str) -> None:
    """Write whole or not at all; where a failure is already told, the first stays."""
    part = path.with_name(f".failure.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(text[:FAILURE_LIMIT])
    with contextlib.suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
