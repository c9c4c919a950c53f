"""Requests to stop (SIGTERM, Slurm's SIGUSR1, Ctrl-C) and to profile (SIGUSR2).

Standard library only, so that they are in place early.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

from .config.contract import PROFILE_SIGNAL

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Request:
    """A flag that signals set and the loop reads between steps. Further signals change nothing."""

    signals: tuple[signal.Signals, ...]

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> Self:
        for number in self.signals:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class StopRequest(Request):
    signals = SIGNALS


class ProfileRequest(Request):
    """The loop takes it back when it has acted on it."""

    signals = (signal.Signals[PROFILE_SIGNAL],)
