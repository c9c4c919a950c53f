"""Which steps are profiled: the recipe's `profiling` section."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

MAX_STEPS = 20
"""A trace grows by every step; nobody reads longer ones, and viewers fail on them."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Chrome traces of a few steps in `<ml root>/output/data/profile`: of planned ones, and of the next ones whenever a
    worker or its supervisor gets SIGUSR2."""

    start_step: int | None = None
    """First step of a planned profile; null plans none. The first steps of a run are not typical."""
    num_steps: int = 3
    """Steps of a profile, planned or asked for."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that write one."""
    memory_snapshot: bool = False
    """Also what allocated the device's memory, as `torch.cuda.memory` records it (view at pytorch.org/memory_viz).
    On CPUs there is none."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.start_step is not None and self.start_step < 1:
            problems.append(Problem("profiling.start_step", f"{self.start_step} is not positive", "steps count from 1"))
        if not 1 <= self.num_steps <= MAX_STEPS:
            problems.append(Problem("profiling.num_steps", f"{self.num_steps} is not in [1, {MAX_STEPS}]"))
        if not self.ranks or min(self.ranks) < 0:
            problems.append(Problem("profiling.ranks", f"{list(self.ranks)} names no ranks", "ranks count from 0"))
        return problems

    def world_problems(self, world_size: int) -> list[Problem]:
        """What is wrong where there are so many ranks."""
        beyond = [rank for rank in self.ranks if rank >= world_size]
        if not beyond:
            return []
        message = f"{', '.join(map(str, beyond))}: no rank of a world of {world_size}"
        return [Problem("profiling.ranks", message, f"use ranks from 0 to {world_size - 1}")]
