"""What a pipeline asks of the other sections of a recipe."""

from __future__ import annotations

from .model import ModelConfig
from .parallel import ParallelConfig
from .problem import Problem
from .train import TrainConfig


def pipeline_problems(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> list[Problem]:
    if parallel.pipeline_parallel == 1:
        return []
    problems = []
    per_rank = parallel.resolved_stages_per_rank
    num_stages = parallel.pipeline_parallel * per_rank
    if num_stages > model.num_layers:
        problems.append(
            Problem(
                "parallel.pipeline_parallel",
                f"{parallel.pipeline_parallel} ranks × {per_rank} stages = {num_stages} stages for "
                f"model.num_layers={model.num_layers}",
                _fitting_stages(parallel, model.num_layers),
            )
        )
    if parallel.schedule.splits_backward:
        problems += _split_backward_problems(parallel, train)
    return problems


def _fitting_stages(parallel: ParallelConfig, num_layers: int) -> str:
    """What makes so few layers enough: only what the schedule allows."""
    ranks, per_rank = parallel.pipeline_parallel, parallel.resolved_stages_per_rank
    most_ranks, most_stages = num_layers // per_rank, num_layers // ranks
    reset = "" if parallel.stages_per_rank is None else " with parallel.stages_per_rank=null"
    fixes = [f"use at most {most_ranks}"] if most_ranks > 1 else [_without_pipeline(parallel)]
    if not parallel.schedule.fixed_stages_per_rank and 1 < most_stages < per_rank:
        fixes.append(f"parallel.stages_per_rank={most_stages}")
    if per_rank > 1 and most_stages >= 1:
        fixes.append(f"parallel.pipeline_schedule=1f1b{reset}")
    return ", or ".join(fixes)


def _without_pipeline(parallel: ParallelConfig) -> str:
    """Keys of a pipeline are refused where there is none."""
    idle = {"pipeline_schedule": parallel.pipeline_schedule != "1f1b", "stages_per_rank": parallel.stages_per_rank}
    values = {"pipeline_schedule": "1f1b", "stages_per_rank": "null"}
    resets = [f"parallel.{name}={values[name]}" for name, is_set in idle.items() if is_set]
    return "use parallel.pipeline_parallel=1" + (f" with {' '.join(resets)}" if resets else "")


def _split_backward_problems(parallel: ParallelConfig, train: TrainConfig) -> list[Problem]:
    """A schedule that splits backward goes through a graph twice: for the gradients of activations, then for those of
    weights. What frees or replaces something after the first time is not there for the second.
    """
    schedule = f"parallel.pipeline_schedule={parallel.pipeline_schedule}"
    others = "or parallel.pipeline_schedule=interleaved_1f1b"
    problems = []
    if parallel.frees_after_forward:
        problems.append(
            Problem(
                "parallel.reshard_after_forward",
                f"true with {schedule}: the weights that a stage's forward used are gone when their gradients are "
                "computed, and torch leaves those gradients out without an error",
                f"set parallel.reshard_after_forward=false, {others}",
            )
        )
    if train.activation_offload:
        problems.append(
            Problem(
                "train.activation_offload",
                f"with {schedule}: what is brought back stays for both parts of backward, and nothing is gained",
                f"set train.activation_offload=false, {others}",
            )
        )
    if train.activation_checkpointing == "selective":
        problems.append(
            Problem(
                "train.activation_checkpointing",
                f"selective with {schedule}: what it kept is gone after the first part of backward, and torch raises",
                f"use none or full, {others}",
            )
        )
    if train.compile:
        problems.append(
            Problem(
                "train.compile",
                f"true with {schedule}: a compiled block has one backward, which would run whole in both parts; torch "
                "has no support for it",
                f"set train.compile=false, {others}",
            )
        )
    return problems
