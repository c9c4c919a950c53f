"""Ctrl-C and SIGTERM around a pool of processes.

An exception may be raised between any two lines, also while the pool holds its own locks: then it hangs. And a worker
that is still importing has no handler yet: then it prints a traceback. So the parent only takes a note, and workers are
born with SIGINT blocked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noted_stop() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a stop was asked for. Outside of the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Processes that are started inside inherit SIGINT as blocked; the caller gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
