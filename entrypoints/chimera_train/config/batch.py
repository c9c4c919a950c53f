"""The arithmetic of batches: global batch = micro batch × data-parallel size × accumulation steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .decode import ConfigError
from .mesh import MeshLayout
from .problem import Problem
from .schedules import SCHEDULES
from .train import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Counts are sequences unless the name says tokens."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    accumulation_steps: int
    """Micro-batches a rank computes for one optimizer step (with a pipeline: the micro-batches in it)."""
    sequence_length: int
    tokens_per_step: int
    num_steps: int
    total_tokens: int


def batch_plan(train: TrainConfig, layout: MeshLayout) -> BatchPlan:
    """Work the batch out, or raise ConfigError with the nearest global batch sizes that divide."""
    per_pass = train.micro_batch_size * layout.data_parallel_size
    schedule = SCHEDULES[layout.schedule]
    accumulation, rest = divmod(train.global_batch_size, per_pass)
    if rest:
        raise ConfigError(
            [
                Problem(
                    "train.global_batch_size",
                    f"{train.global_batch_size} is not a multiple of micro_batch_size {train.micro_batch_size} × "
                    f"data-parallel size {layout.data_parallel_size} = {per_pass}",
                    _nearest(accumulation, per_pass, layout),
                )
            ]
        )
    if layout.pipeline > 1 and not schedule.allows(accumulation, layout.pipeline):
        raise ConfigError(
            [
                Problem(
                    "train.global_batch_size",
                    f"{train.global_batch_size} gives {accumulation} micro-batches to a pipeline of {layout.pipeline} "
                    f"ranks, and {layout.schedule} wants {schedule.rule(layout.pipeline)}",
                    _nearest(accumulation, per_pass, layout),
                )
            ]
        )
    tokens = train.global_batch_size * train.sequence_length
    return BatchPlan(
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        data_parallel_size=layout.data_parallel_size,
        accumulation_steps=accumulation,
        sequence_length=train.sequence_length,
        tokens_per_step=tokens,
        num_steps=train.num_steps,
        total_tokens=tokens * train.num_steps,
    )


def _nearest(accumulation: int, per_pass: int, layout: MeshLayout) -> str:
    """The next global batch sizes that the layout can run, below and above `accumulation` micro-batches and a bit."""
    schedule = SCHEDULES[layout.schedule]

    def allowed(micro_batches: int) -> bool:
        return layout.pipeline == 1 or schedule.allows(micro_batches, layout.pipeline)

    below = next((n for n in range(accumulation, 0, -1) if allowed(n)), None)
    above = next(n for n in itertools.count(accumulation + 1) if allowed(n))
    return "nearest valid: " + " or ".join(str(n * per_pass) for n in (below, above) if n is not None)
