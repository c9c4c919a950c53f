"""Planted faults for drills: `CHIMERA_FAULT=kill:<point>:<step>[:<rank>]` ends a worker as `kill -9` would.

Points: `step` (the loop, after the step's update) and `checkpoint_write` (in the middle of a data file of the
checkpoint of that step). Without a rank every rank that reaches the point dies. A fault belongs to the first attempt
of a run (CHIMERA_ATTEMPT unset or 1), so that the attempt that resumes gets through. Standard library only.
"""

from __future__ import annotations

import os
import signal

from .config.contract import ATTEMPT_VARIABLE, FAULT_VARIABLE
from .config.fault import parse_fault


def at(point: str, *, step: int, rank: int) -> None:
    """Die here if a fault is planted here. Raises ValueError on a value of CHIMERA_FAULT that has another form."""
    text = os.environ.get(FAULT_VARIABLE)
    if not text or os.environ.get(ATTEMPT_VARIABLE, "1") != "1":
        return
    fault = parse_fault(text)
    if fault.point == point and fault.step == step and fault.rank in (None, rank):
        os.kill(os.getpid(), signal.SIGKILL)
