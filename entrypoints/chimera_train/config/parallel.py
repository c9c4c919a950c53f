"""Degrees of parallelism: the recipe's `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem
from .schedules import SCHEDULES, PipelineSchedule, Schedule

ContextBackend = Literal["all_gather", "ulysses", "ring"]
DEFAULT_SCHEDULE: PipelineSchedule = "1f1b"


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
    async_tensor_parallel: bool = False
    """Cut the matrix products beside tensor parallel's collectives into pieces that overlap with them, over the GPUs'
    symmetric memory. Needs train.compile and tensor_parallel above 1."""
    pipeline_parallel: int = 1
    context_parallel: int = 1
    """Ranks that share every sequence, each with two pieces of it: 2 × context_parallel × tensor_parallel divides
    train.sequence_length."""
    context_backend: ContextBackend = "all_gather"
    """How attention crosses the ranks of a sequence; the results are the same. all_gather: every rank gathers all keys
    and values, which are few with grouped-query attention; works with everything. ulysses: an all-to-all of heads for
    tokens, less traffic where there are as many heads of keys as of queries; heads must divide. ring: keys and values
    pass from rank to rank, the least memory for the longest sequences; no sliding window, no separate documents."""
    expert_parallel: int = 1
    """Ranks over which the experts of a layer are split; divides model.num_experts. Tokens travel to them, so the host
    waits for the device once a layer, and train.compile compiles a layer's attention only."""
    pipeline_schedule: PipelineSchedule = DEFAULT_SCHEDULE
    """interleaved_1f1b has less idle time than 1f1b, and more traffic. The last three split backward in two and idle
    least; they want parameters kept (reshard_after_forward), and neither selective checkpointing nor compiling."""
    stages_per_rank: int | None = None
    """Pieces of the model on one rank of a pipeline. None: 1 for gpipe and 1f1b, 2 for the others."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters after forward (ZeRO-3) instead of keeping them for backward (ZeRO-2).
    None: free them, but keep them in a pipeline, which would gather them for every micro-batch, twice, and save little:
    torch keeps a stage whole from its first backward on."""
    defer_gradient_sync: bool = False
    """Keep gradients whole over the micro-batches of a step and scatter them once, in the last. Saves traffic
    (precision.reduce_dtype's bytes × parameters a micro-batch), costs memory (the same bytes, unsharded).
    False keeps a shard only. Replicas (data_parallel) are always reduced once a step; in a pipeline all is."""

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.pipeline_schedule]

    @property
    def resolved_stages_per_rank(self) -> int:
        if self.pipeline_parallel == 1:
            return 1
        return self.stages_per_rank or self.schedule.default_stages_per_rank

    @property
    def frees_after_forward(self) -> bool:
        """reshard_after_forward, resolved."""
        if self.reshard_after_forward is None:
            return self.pipeline_parallel == 1
        return self.reshard_after_forward

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
        problems += self._pipeline_problems()
        return problems

    def _pipeline_problems(self) -> list[Problem]:
        problems = self._stages_problems()
        if self.pipeline_parallel == 1 and self.pipeline_schedule != DEFAULT_SCHEDULE:
            key = "parallel.pipeline_schedule"
            message = f"{self.pipeline_schedule} would be ignored: parallel.pipeline_parallel is 1"
            fix = f"set {key}={DEFAULT_SCHEDULE}, or parallel.pipeline_parallel above 1"
            problems.append(Problem(key, message, fix, no_effect=True))
        return problems

    def _stages_problems(self) -> list[Problem]:
        if self.stages_per_rank is None:
            return []
        key, only = "parallel.stages_per_rank", self.schedule.default_stages_per_rank
        if self.stages_per_rank < 1:
            return [Problem(key, f"{self.stages_per_rank} is not positive", "null takes the schedule's own")]
        if self.pipeline_parallel == 1:
            message = f"{self.stages_per_rank} would be ignored: parallel.pipeline_parallel is 1"
            return [Problem(key, message, f"{key}=null", no_effect=True)]
        if self.schedule.fixed_stages_per_rank and self.stages_per_rank != only:
            message = (
                f"{self.stages_per_rank}, but parallel.pipeline_schedule={self.pipeline_schedule} has {only} a rank"
            )
            return [Problem(key, message, f"{key}={only}, or another schedule")]
        return []
