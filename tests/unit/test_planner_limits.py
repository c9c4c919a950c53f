"""Where a plan has no sensible number: too many jobs, runs that never end, fallbacks of another size."""

from __future__ import annotations

import time

import pytest

from chimera_sm.errors import RecipeError
from chimera_sm.planner.plan import plan
from chimera_sm.planner.render_text import format_plan
from chimera_sm.planner.segments import MAX_SEGMENTS, count, split
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.compose import compose


def planned(*overrides: str) -> Plan:
    return plan(compose(list(overrides)))


def chosen_days(made: Plan) -> float | None:
    (days,) = [cost.days for cost in made.costs if cost.chosen]
    return None if days is None else days.p50


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=70b", "train.num_steps=1e12"),
        ("recipe=8b", "train.num_steps=9000000000000000"),
        ("recipe=8b", "capacity.max_run_hours=0.3"),
        ("recipe=405b", "train.num_steps=1e9", "capacity=spot"),
    ],
)
def test_more_jobs_than_anyone_submits_are_refused_at_once(overrides: tuple[str, ...]) -> None:
    recipe = compose(list(overrides))
    start = time.process_time()
    with pytest.raises(RecipeError) as caught:
        plan(recipe)
    assert time.process_time() - start < 1
    assert [p.key for p in caught.value.problems] == ["train.num_steps", "capacity.max_run_hours"]
    assert "more than 1,000" in str(caught.value)
    assert f"{recipe.train.num_steps:,} steps of" in str(caught.value)


def test_as_many_jobs_as_may_be_are_planned() -> None:
    arguments = {"step_s": 10.0, "startup_s": 600.0}
    assert count(300 * MAX_SEGMENTS, max_run_s=3600, **arguments) == MAX_SEGMENTS
    segments = split(num_steps=300 * MAX_SEGMENTS, max_run_hours=1, max_wait_hours=None, **arguments)
    assert len(segments) == MAX_SEGMENTS
    assert sum(s.num_steps for s in segments) == 300 * MAX_SEGMENTS


@pytest.mark.parametrize("num_steps", [1, 299, 300, 301, 12_345])
def test_the_count_of_jobs_is_the_length_of_the_split(num_steps: int) -> None:
    segments = split(num_steps=num_steps, step_s=10.0, startup_s=600.0, max_run_hours=1, max_wait_hours=None)
    assert count(num_steps, 10.0, 600.0, 3600) == len(segments)


@pytest.mark.parametrize("hours", [0.2, 0.5, 2.0])
def test_the_start_up_of_a_job_is_counted_once(hours: float) -> None:
    made = planned("recipe=8b", "train.num_steps=100", f"capacity.max_run_hours={hours}")
    assert made.job_length is not None
    training_s = made.costs[0].days.p50 * 86_400 - len(made.segments) * made.job_length.startup_s
    assert 1.0 < training_s / (100 * made.step.total_s) < 1.1


@pytest.mark.parametrize("hours", [0.001, 0.01, 0.1, 1 / 6])
def test_a_job_that_ends_before_its_first_step_promises_nothing(hours: float) -> None:
    made = planned("recipe=8b", f"capacity.max_run_hours={hours}")
    assert all((cost.days, cost.usd) == (None, None) for cost in made.costs)
    assert all("before its first step" in cost.price_basis for cost in made.costs)
    assert len(made.segments) == 1


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (("recipe=70b", "checkpoint.interval_steps=0"), "spot"),
        (("recipe=70b", "checkpoint.interval_steps=20000"), "spot"),
        (("recipe=405b", "checkpoint.interval_steps=0"), "on-demand"),
    ],
)
def test_a_hopeless_run_has_no_days_and_no_dollars(overrides: tuple[str, ...], kind: str) -> None:
    made = planned(*overrides)
    (cost,) = [cost for cost in made.costs if cost.chosen]
    assert (cost.days, cost.usd, cost.would_finish) == (None, None, False)
    assert f"would not finish on {kind} at this interruption rate" in cost.price_basis
    assert len(made.segments) == 1
    assert made.reliability.failures_expected is None
    assert "unknown days" in format_plan(made)


def test_days_are_never_astronomical() -> None:
    for steps in (100, 1_000, 3_000, 10_000, 30_000):
        made = planned("recipe=405b", "capacity=spot", f"checkpoint.interval_steps={steps}")
        for cost in made.costs:
            assert cost.would_finish is not None
            assert cost.days is None or cost.days.p90 < 20 * 2 * 60


def test_fallbacks_have_their_own_memory_disk_and_jobs() -> None:
    fallbacks = "instances.fallbacks=[{type:ml.p4d.24xlarge,count:4},{type:ml.p5en.48xlarge,count:4}]"
    made = planned("recipe=8b", fallbacks, "train.micro_batch_size=2")
    assert [(f.index, f.type) for f in made.fallbacks] == [(0, "ml.p4d.24xlarge"), (1, "ml.p5en.48xlarge")]
    small, large = made.fallbacks
    assert made.memory.fits
    assert (small.memory.fits, large.memory.fits) == (False, True)
    assert (small.memory.capacity_gib, large.memory.capacity_gib) == (40.0, 141.0)
    assert small.memory.total_gib == made.memory.total_gib
    assert small.disk.available_gb == 8_000
    assert small.num_jobs > len(made.segments)
    assert "of 40.0 GiB on ml.p4d.24xlarge: DOES NOT FIT" in format_plan(made)


def test_a_fallback_with_smaller_disks_is_compared_with_them() -> None:
    fallbacks = "instances.fallbacks=[{type:ml.p4d.24xlarge,count:4}]"
    made = planned("recipe=8b", fallbacks, "checkpoint.keep_last=100")
    assert (made.disk.available_gb, made.disk.fits) == (30_400, True)
    assert (made.fallbacks[0].disk.available_gb, made.fallbacks[0].disk.fits) == (8_000, False)


def test_a_plan_without_fallbacks_has_none() -> None:
    assert planned("recipe=8b").fallbacks == ()
    assert planned("recipe=tiny").job_length is None
