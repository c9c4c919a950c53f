"""The arithmetic of ranks: one definition for the planner and for the trainer.

Axes, outermost first: pipeline, data_parallel (replicas), fully_sharded, context, tensor. Ranks are numbered host by
host, so the innermost axis, tensor, stays inside a host and pipeline stages fall on different hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .decode import ConfigError
from .parallel import ParallelConfig
from .problem import Problem, divisors
from .schedules import SCHEDULES, PipelineSchedule

AXES = ("pipeline", "data_parallel", "fully_sharded", "context", "tensor")


@dataclass(frozen=True)
class MeshLayout:
    """How `hosts` × `workers_per_host` ranks factor into the axes. All degrees are resolved (no None)."""

    hosts: int
    workers_per_host: int
    pipeline: int
    data_parallel: int
    fully_sharded: int
    context: int
    tensor: int
    expert: int
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 1

    @property
    def world_size(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def shard(self) -> int:
        """Ranks that dense parameters are sharded over."""
        return self.fully_sharded * self.context

    @property
    def expert_shard(self) -> int:
        """Ranks that one expert's parameters are sharded over: what expert parallel leaves of the ranks of a replica's
        stage, which all hold different tokens."""
        return self.fully_sharded * self.context * self.tensor // self.expert

    @property
    def experts_apart(self) -> bool:
        """Whether the ranks that share an expert are others than those that share a dense parameter."""
        return self.expert > 1 or self.tensor > 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples: replicas × shards."""
        return self.data_parallel * self.fully_sharded

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis.

        >>> layout(ParallelConfig(tensor_parallel=2), hosts=2, workers_per_host=2).coordinates(3)
        {'pipeline': 0, 'data_parallel': 0, 'fully_sharded': 1, 'context': 0, 'tensor': 1}
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Index of `rank`'s samples among `data_parallel_size` shares."""
        at = self.coordinates(rank)
        return at["data_parallel"] * self.fully_sharded + at["fully_sharded"]

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into: see `stages.stages`."""
        return self.pipeline * self.stages_per_rank

    def stage_numbers(self, pipeline_rank: int) -> list[int]:
        """Stages of the rank at this coordinate of the pipeline axis, ascending.

        >>> config = ParallelConfig(pipeline_parallel=4, pipeline_schedule="zbv")
        >>> mesh = layout(config, hosts=4, workers_per_host=1)
        >>> [mesh.stage_numbers(rank) for rank in range(4)]
        [[0, 7], [1, 6], [2, 5], [3, 4]]
        """
        if self.pipeline > 1 and SCHEDULES[self.schedule].v_shaped:
            return [pipeline_rank, self.num_stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.num_stages, self.pipeline))

    def rank_of_stage(self, stage: int) -> int:
        """Coordinate on the pipeline axis of the rank that holds `stage`."""
        if self.pipeline > 1 and SCHEDULES[self.schedule].v_shaped:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.pipeline

    def host_of(self, rank: int) -> int:
        return rank // self.workers_per_host

    def ranks(self) -> Iterator[int]:
        return iter(range(self.world_size))


def layout(parallel: ParallelConfig, *, hosts: int, workers_per_host: int) -> MeshLayout:
    """Factor the world, or raise ConfigError with the product that went wrong and the degrees that would do."""
    world = hosts * workers_per_host
    fixed = parallel.pipeline_parallel * parallel.data_parallel * parallel.context_parallel * parallel.tensor_parallel
    product = (
        f"pipeline_parallel {parallel.pipeline_parallel} × data_parallel {parallel.data_parallel} × "
        f"context_parallel {parallel.context_parallel} × tensor_parallel {parallel.tensor_parallel}"
    )
    machines = f"instances.count {hosts} × {workers_per_host} workers a host = {world} ranks"
    if workers_per_host % parallel.tensor_parallel:
        raise ConfigError(
            [
                Problem(
                    "parallel.tensor_parallel",
                    f"{parallel.tensor_parallel} does not divide the {workers_per_host} workers of a host; "
                    "tensor parallel stays inside a host",
                    f"use one of {divisors(workers_per_host)}",
                )
            ]
        )
    if parallel.fully_sharded is None:
        if world % fixed:
            raise ConfigError(
                [
                    Problem(
                        "parallel",
                        f"{product} = {fixed} does not divide {machines}",
                        f"choose degrees whose product divides {world}",
                    )
                ]
            )
        sharded = world // fixed
    else:
        sharded = parallel.fully_sharded
        if fixed * sharded != world:
            fix = f"parallel.fully_sharded={world // fixed}" if world % fixed == 0 else "null takes what is left"
            raise ConfigError(
                [
                    Problem(
                        "parallel.fully_sharded",
                        f"{product} × fully_sharded {sharded} = {fixed * sharded}, but there are {machines}",
                        fix,
                    )
                ]
            )
    tokens_apart = sharded * parallel.context_parallel * parallel.tensor_parallel
    if tokens_apart % parallel.expert_parallel:
        raise ConfigError(
            [
                Problem(
                    "parallel.expert_parallel",
                    f"{parallel.expert_parallel} does not divide fully_sharded × context_parallel × tensor_parallel = "
                    f"{tokens_apart}",
                    f"use one of {divisors(tokens_apart)}",
                )
            ]
        )
    return MeshLayout(
        hosts=hosts,
        workers_per_host=workers_per_host,
        pipeline=parallel.pipeline_parallel,
        data_parallel=parallel.data_parallel,
        fully_sharded=sharded,
        context=parallel.context_parallel,
        tensor=parallel.tensor_parallel,
        expert=parallel.expert_parallel,
        schedule=parallel.pipeline_schedule,
        stages_per_rank=parallel.resolved_stages_per_rank,
    )
