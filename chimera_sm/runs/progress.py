"""A run's progress in the foreground: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from chimera_sm.errors import RunFailed

from .status import RunStatus

LINE_EVERY_S = 10.0
"""Where the output is no terminal: seconds between lines while nothing but the step changes."""


def describe(status: RunStatus) -> str:
    """One line: `running, step 120/300, loss 3.2104, 5,310 tokens/s, 1:02 left`."""
    parts = [status.state]
    if status.step is not None:
        parts.append(f"step {status.step}" + (f"/{status.num_steps}" if status.num_steps else ""))
    parts += _measures(status)
    line = ", ".join(parts)
    return line + (f" ({status.reason})" if status.reason else "")


def _measures(status: RunStatus) -> list[str]:
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.eta_s is not None:
        parts.append(f"{format_duration(status.eta_s)} left")
    return parts


def format_duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 03:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def watch(
    status: Callable[[], RunStatus],
    *,
    until: Callable[[RunStatus], bool] = lambda status: False,
    poll_s: float = 0.5,
    stream: TextIO | None = None,
) -> RunStatus:
    """Show a run until it has ended or `until` holds; returns the last status.

    Raises RunFailed where nothing but a resume will move the run on. Ctrl-C comes out as KeyboardInterrupt and leaves
    the run as it is.
    """
    stream = stream or sys.stdout
    show = _Bar(stream) if stream.isatty() else _Lines(stream)
    try:
        while True:
            now = status()
            done = now.ended or now.needs_resume or until(now)
            # Of a run that failed the caller tells the reason, as its error.
            show.update(replace(now, reason="") if now.state == "failed" or now.needs_resume else now, done)
            if done:
                break
            time.sleep(poll_s)
    finally:
        show.close()
    if now.needs_resume:
        raise RunFailed(f"the run was interrupted: {now.reason}", fix="chimera_sm resume goes on from its checkpoint")
    return now


class _Lines:
    """A line when the state changes, and one now and then."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last: RunStatus | None = None
        self._due = 0.0

    def update(self, status: RunStatus, done: bool) -> None:
        last = self._last
        changed = last is None or (status.state, status.reason) != (last.state, last.reason)
        moved = last is not None and status.step != last.step
        if changed or (done and moved) or (moved and time.monotonic() >= self._due):
            print(describe(status), file=self._stream, flush=True)
            self._last = status
            self._due = time.monotonic() + LINE_EVERY_S

    def close(self) -> None:
        pass


class _Bar:
    """A progress bar with loss, tokens/s and ETA; states other than running stand above it."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measures]}"),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task("starting", total=None, measures="")
        self._shown = ""
        self._progress.start()

    def update(self, status: RunStatus, done: bool) -> None:
        if status.reason and status.reason != self._shown:
            self._progress.console.print(f"{status.state}: {status.reason}", markup=False, highlight=False)
            self._shown = status.reason
        self._progress.update(
            self._task,
            description=status.state,
            completed=status.step or 0,
            total=status.num_steps,
            measures="  ".join(_measures(status)),
        )

    def close(self) -> None:
        self._progress.stop()
