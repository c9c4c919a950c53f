"""Planted faults for drills: `CHIMERA_FAULT=kill:<point>:<step>[:<rank>]` ends a worker as `kill -9` would.

Points: `step` (the loop, after the step's update) and `checkpoint_write` (in the middle of a data file of the
checkpoint of that step). Without a rank every rank that reaches the point dies. A fault belongs to the first attempt
of a run (CHIMERA_ATTEMPT unset or 1), so that the attempt that resumes gets through. Standard library only.
"""

from __future__ import annotations

import os
import signal

from .config.contract import ATTEMPT_VARIABLE, FAULT_VARIABLE

POINTS = ("step", "checkpoint_write")


def at(point: str, *, step: int, rank: int) -> None:
    """Die here if a fault is planted here. Raises ValueError on a value of CHIMERA_FAULT that has another form."""
    text = os.environ.get(FAULT_VARIABLE)
    if not text or os.environ.get(ATTEMPT_VARIABLE, "1") != "1":
        return
    action, _, rest = text.partition(":")
    planted, *numbers = rest.split(":")
    if action != "kill" or planted not in POINTS or len(numbers) not in (1, 2) or not all(map(str.isdecimal, numbers)):
        raise ValueError(f"{FAULT_VARIABLE}={text!r} is not kill:<point>:<step>[:<rank>], point {' or '.join(POINTS)}")
    if planted == point and int(numbers[0]) == step and (len(numbers) == 1 or int(numbers[1]) == rank):
        os.kill(os.getpid(), signal.SIGKILL)
