"""A run that is longer than one job may last, as a list of jobs over one checkpoint prefix."""

from __future__ import annotations

import math

from .types import Segment

MAX_SEGMENTS = 1_000
"""More jobs than anyone submits one after the other."""


def steps_per_job(step_s: float, startup_s: float, max_run_s: float) -> int:
    """Steps that one job gets through; at least 1, though the job may be too short for it."""
    return max(1, int((max_run_s - startup_s) / step_s))


def count(num_steps: int, step_s: float | None, startup_s: float, max_run_s: float) -> int:
    """Jobs of a run, by the same arithmetic as `split`."""
    return 1 if step_s is None else math.ceil(num_steps / steps_per_job(step_s, startup_s, max_run_s))


def split(
    *, num_steps: int, step_s: float | None, startup_s: float, max_run_hours: float, max_wait_hours: float | None
) -> tuple[Segment, ...]:
    """Cut `num_steps` into jobs of at most `max_run_hours`.

    `step_s` is a step's share of the running time, with saves and interruptions in it; None makes one segment.
    A job that is stopped at its limit saves and the next goes on from there, so the cuts are a forecast, not a rule.
    The caller keeps their number (`count`) in bounds.
    """
    max_run_s = round(max_run_hours * 3600)
    max_wait_s = None if max_wait_hours is None else round(max_wait_hours * 3600)
    per_job = num_steps if step_s is None else steps_per_job(step_s, startup_s, max_run_s)
    return tuple(
        Segment(
            index=index,
            start_step=start,
            num_steps=min(per_job, num_steps - start),
            max_run_s=max_run_s,
            max_wait_s=max_wait_s,
        )
        for index, start in enumerate(range(0, num_steps, per_job))
    )
