"""The arithmetic of batches: global batch = micro batch × data-parallel size × accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

from .decode import ConfigError
from .mesh import MeshLayout
from .problem import Problem
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
    if train.global_batch_size % per_pass:
        smallest = per_pass * layout.pipeline
        below = train.global_batch_size // per_pass * per_pass
        nearest = [str(n) for n in (below, below + per_pass) if n >= smallest] or [str(smallest)]
        raise ConfigError(
            [
                Problem(
                    "train.global_batch_size",
                    f"{train.global_batch_size} is not a multiple of micro_batch_size {train.micro_batch_size} × "
                    f"data-parallel size {layout.data_parallel_size} = {per_pass}",
                    f"nearest valid: {' or '.join(nearest)}",
                )
            ]
        )
    accumulation = train.global_batch_size // per_pass
    if accumulation < layout.pipeline:
        raise ConfigError(
            [
                Problem(
                    "train.global_batch_size",
                    f"{train.global_batch_size} gives {accumulation} micro-batches to a pipeline of {layout.pipeline} "
                    "stages, which would stand idle",
                    f"use at least {per_pass * layout.pipeline}",
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
