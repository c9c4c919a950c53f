"""Degrees of parallelism: the recipe's `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism. Their product over all axes is the world size:

    pipeline_parallel × data_parallel × fully_sharded × context_parallel × tensor_parallel = hosts × workers a host.
    Expert parallel reuses the fully_sharded, context and tensor axes and is no factor of its own.
    """

    data_parallel: int = 1
    """Replicas of the sharded group (hybrid sharding); 1 is plain FSDP."""
    fully_sharded: int | None = None
    """Ranks over which parameters, gradients and optimizer states are sharded. None: what the other degrees leave."""
    tensor_parallel: int = 1
    """Stays inside a host."""
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    reshard_after_forward: bool = True
    """Free the gathered parameters after forward (ZeRO-3) instead of keeping them for backward (ZeRO-2)."""
    defer_gradient_sync: bool = False
    """Keep gradients whole over the micro-batches of a step and scatter them once, in the last. Saves traffic
    (precision.reduce_dtype's bytes × parameters a micro-batch), costs memory (the same bytes, unsharded).
    False keeps a shard only. Replicas (data_parallel) are always reduced once a step."""

    def validate(self) -> list[Problem]:
        problems = []
        for name in (
            "data_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
        ):
            if getattr(self, name) < 1:
                problems.append(Problem(f"parallel.{name}", f"{getattr(self, name)} is not a positive degree"))
        if self.fully_sharded is not None and self.fully_sharded < 1:
            problems.append(
                Problem(
                    "parallel.fully_sharded", f"{self.fully_sharded} is not a positive degree", "null takes the rest"
                )
            )
        return problems
