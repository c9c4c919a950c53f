"""A request to stop, from SIGTERM, Slurm's SIGUSR1 or Ctrl-C. Standard library only, so that it is in place early."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """A flag that signals set and the loop reads between steps. Further signals change nothing."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> StopRequest:
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
