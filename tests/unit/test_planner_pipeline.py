"""The planner's closed forms of pipelines against the order of work that torch makes, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_planner_models import occupancy
from torch.distributed.pipelining import schedules as torch_schedules

from chimera_sm.planner.memory import in_flight
from chimera_sm.planner.step_time import bubble_share
from chimera_train.config import ConfigError, MeshLayout, ParallelConfig, TrainConfig, batch_plan, layout
from chimera_train.config.schedules import SCHEDULES

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
SECONDS = {"F": 1, "I": 1, "W": 1, "B": 2}
TORCH = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def torch_schedule(mesh: MeshLayout, num_micro_batches: int) -> Any:
    """Raises ValueError where torch has none for so many micro-batches."""
    stages = [
        SimpleNamespace(
            stage_index=number,
            num_stages=mesh.num_stages,
            group_size=mesh.pipeline,
            group_rank=0,
            is_first=number == 0,
            is_last=number == mesh.num_stages - 1,
            submod=torch.nn.Identity(),
        )
        for number in mesh.stage_numbers(0)
    ]
    return TORCH[mesh.schedule](stages, num_micro_batches, loss_fn=lambda *_: None)


@dataclass
class Timeline:
    idle: float
    """Of the first rank, in micro-batches."""
    peaks: list[float]
    """By rank: micro-batches in flight, a stage of one counting as its share of the rank's stages."""


def run(schedule: Any, mesh: MeshLayout) -> Timeline:
    """Each operation starts when its rank is free and what it needs is there."""
    orders = [
        [(KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
         for action in schedule.pipeline_order[rank] if action is not None
         for part in (action.sub_actions or (action,))]
        for rank in range(mesh.pipeline)
    ]  # fmt: skip
    done: dict[tuple[str, int, int], float] = {}
    clocks, live, peaks, places = ([0.0] * mesh.pipeline for _ in range(4))
    places = [0] * mesh.pipeline
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, micro_batch = order[places[rank]]
                needs = []
                if kind == "F" and stage:
                    needs = [("F", stage - 1, micro_batch)]
                if kind in "IB":
                    needs = [("F", stage, micro_batch)]
                    needs += [("I", stage + 1, micro_batch)] if stage < mesh.num_stages - 1 else []
                if any(need not in done for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)]) + SECONDS[kind]
                done["I" if kind == "B" else kind, stage, micro_batch] = clocks[rank]
                live[rank] += {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
                peaks[rank] = max(peaks[rank], live[rank])
                places[rank] += 1
        assert places != before, "deadlock"
    num_micro_batches = len({micro_batch for _, _, micro_batch in orders[0]})
    idle = max(clocks) / 3 / mesh.stages_per_rank - num_micro_batches
    return Timeline(idle, [peak / mesh.stages_per_rank for peak in peaks])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", TORCH)
def test_idle_time_and_micro_batches_in_flight_are_those_of_the_schedule(schedule: str, ranks: int) -> None:
    parallel = ParallelConfig(pipeline_parallel=ranks, pipeline_schedule=schedule)
    mesh = layout(parallel, hosts=ranks, workers_per_host=1)
    case = occupancy(f"parallel.pipeline_schedule={schedule}")
    for micro_batches in (2 * ranks, 8 * ranks):
        case = replace(case, layout=mesh, batch=replace(case.batch, accumulation_steps=micro_batches))
        timeline = run(torch_schedule(mesh, micro_batches), mesh)
        assert timeline.peaks == [in_flight(case, rank) for rank in range(ranks)]
        factor = 0.83 if schedule == "interleaved_1f1b" else 1  # a fit to published runs
        assert bubble_share(mesh) == pytest.approx(factor * timeline.idle)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", TORCH)
def test_the_numbers_of_micro_batches_that_are_refused_are_torchs(schedule: str, ranks: int) -> None:
    parallel = ParallelConfig(pipeline_parallel=ranks, pipeline_schedule=schedule)
    mesh = layout(parallel, hosts=ranks, workers_per_host=1)
    for micro_batches in range(ranks, 4 * ranks + 2):
        train = TrainConfig(num_steps=1, global_batch_size=micro_batches, micro_batch_size=1, sequence_length=8)
        try:
            torch_schedule(mesh, micro_batches)
        except ValueError:
            with pytest.raises(ConfigError, match="nearest valid"):
                batch_plan(train, mesh)
        else:
            assert batch_plan(train, mesh).accumulation_steps == micro_batches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_stage_is_on_one_rank(schedule: str, ranks: int) -> None:
    parallel = ParallelConfig(pipeline_parallel=ranks, pipeline_schedule=schedule)
    mesh = layout(parallel, hosts=ranks, workers_per_host=1)
    held = {stage: rank for rank in range(ranks) for stage in mesh.stage_numbers(rank)}
    assert held == {stage: mesh.rank_of_stage(stage) for stage in range(mesh.num_stages)}
    assert sorted(held) == list(range(ranks * mesh.stages_per_rank))
