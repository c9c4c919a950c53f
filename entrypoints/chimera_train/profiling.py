"""Profiles of a few steps, planned by the recipe or asked for by a signal."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .config import ConfigError, ProfilingConfig
from .distributed import Worker

MAX_PROFILES = 8
"""Of one rank in one attempt, so that requests cannot fill the disk."""
MEMORY_EVENTS = 100_000
"""Allocations that a memory snapshot remembers; the oldest go first."""


class StepProfiler:
    """Writes `step-<first>-rank-<rank>.json.gz` (a chrome trace) and, on a GPU, `….memory.pickle` into `folder`."""

    def __init__(self, config: ProfilingConfig, worker: Worker, folder: Path):
        """Raises ConfigError where a rank of the recipe does not exist."""
        if problems := config.world_problems(worker.world_size):
            raise ConfigError(problems)
        self._config, self._folder, self._rank = config, folder, worker.rank
        self._on_gpu = worker.device.type == "cuda"
        self._takes_part = worker.rank in config.ranks
        self._starts = {config.start_step}
        self._first = 0
        """Of the profile under way."""
        self._profile: profile | None = None
        self._written = 0
        if config.memory_snapshot and not self._on_gpu and worker.is_first:
            print("profiling.memory_snapshot: not available on a CPU; there will be traces alone", flush=True)

    def request(self, next_step: int) -> None:
        """Profile from `next_step` on, unless a profile is under way then. Call on all ranks alike."""
        self._starts.add(next_step)

    def before_step(self, step: int) -> None:
        if step not in self._starts or not self._takes_part or self._profile is not None:
            return
        if self._written == MAX_PROFILES:
            print(f"no profile: rank {self._rank} has written {MAX_PROFILES} in this attempt", flush=True)
            return
        if self._config.memory_snapshot and self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._first = step
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            acc_events=True,
        )
        self._profile.start()

    def after_step(self, step: int) -> str | None:
        """Write the profile if `step` was its last; returns what to tell about it."""
        if self._profile is None or step < self._first + self._config.num_steps - 1:
            return None
        return self.finish()

    def finish(self) -> str | None:
        """Write what there is of a profile under way; a disk that is full costs the profile, not the run."""
        if self._profile is None:
            return None
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        path = self._folder / f"step-{self._first}-rank-{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            if self._config.memory_snapshot and self._on_gpu:
                torch.cuda.memory._dump_snapshot(str(path).replace(".json.gz", ".memory.pickle"))
        except (OSError, RuntimeError) as error:
            return f"warning: the profile {path} was not written: {error}"
        finally:
            if self._config.memory_snapshot and self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
            self._profile = None
            self._written += 1
        return f"profile of step {self._first} and after: {path}"
