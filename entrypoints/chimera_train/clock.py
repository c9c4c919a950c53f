"""Where the time of a step goes, by phase, without making the host wait for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Seconds by phase: on a GPU between events of its stream, elsewhere by the wall.

    Phases are the metrics of the same name (`forward` → `forward_s`, …). What FSDP communicates overlaps with forward
    and backward and is part of them.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._wall: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._finished: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what happens inside to the phase; a phase may come several times in a step."""
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._wall[name] += time.perf_counter() - started

    def step_done(self) -> dict[str, float]:
        """Seconds by phase of the last step whose work is known to be done: this one, or on a GPU the one before,
        because the device is still at this one's update. Empty where there is none yet."""
        if not self._on_gpu:
            done, self._wall = dict(self._wall), defaultdict(float)
            return done
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._finished:
            seconds[name] += start.elapsed_time(end) / 1e3
        self._finished, self._events = self._events, []
        return dict(seconds)
