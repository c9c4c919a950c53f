"""Signals as something a loop can wait for. A process that is PID 1 gets no signal it has no handler for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from types import FrameType

from chimera_train.config.contract import PROFILE_SIGNAL

PARENT_VARIABLE = "CHIMERA_PARENT_PID"
"""Set by the local target: when this process is no longer our parent, we are asked to stop."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Slurm sends what `--signal` names to every process of a step: this one must not die of it while workers save."""


class Signals:
    """STOP_SIGNALS set `stop_requested`, PROFILE_SIGNAL `profile_requested`; they and SIGCHLD end a `wait` early."""

    def __init__(self, environment: Mapping[str, str]):
        self.stop_requested = False
        self.profile_requested = False
        self._parent = int(environment.get(PARENT_VARIABLE, "0"))
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def install(self) -> None:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.signal(signal.Signals[PROFILE_SIGNAL], self._profile)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal comes or the time is over."""
        if not self.stop_requested and self._parent and os.getppid() != self._parent:
            self.stop_requested = True
            return
        select.select([self._read], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def _profile(self, number: int, frame: FrameType | None) -> None:
        self.profile_requested = True
