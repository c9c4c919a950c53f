"""The Monte Carlo of a run: by hand where nothing is left to chance, and against the closed form where that holds."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from chimera_sm.errors import UsageError
from chimera_sm.planner.fleets import failure_rate
from chimera_sm.planner.gamma import Gamma, GammaMixture
from chimera_sm.planner.reliability import wall_clock_factor
from chimera_sm.planner.simulate import SimulatedJob, Spread, simulate

HOUR = 3600.0
FOUR_SIGMA = 4.0


def job(**changes: object) -> SimulatedJob:
    plain = SimulatedJob(
        useful_s=100 * HOUR, interval_s=HOUR, stall_s=60, restart_s=900, failures_per_h=0.02, reclaims_per_h=0.0
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("useful_h", "interval_s", "stall_s", "restart_s", "failures", "reclaims"),
    [
        (1000, 3600, 60, 900, 0.02, 0.0),
        (1000, 3600, 60, 900, 0.5, 0.0),
        (200, 600, 10, 240, 1 / 3.09, 0.0),
        (100, 7200, 300, 1800, 0.3, 0.0),
        (50, 36000, 600, 3600, 0.15, 0.0),  # most intervals are interrupted
        (100, 3600, 0, 0, 1.0, 0.0),
        (100, 3600, 60, 900, 0.05, 0.2),
        (100, 1800, 1800, 60, 0.4, 0.4),  # saving takes as long as computing
    ],
)
def test_the_mean_is_that_of_the_closed_form(
    useful_h: float, interval_s: float, stall_s: float, restart_s: float, failures: float, reclaims: float
) -> None:
    made = simulate(
        SimulatedJob(
            useful_s=useful_h * HOUR,
            interval_s=interval_s,
            stall_s=stall_s,
            restart_s=restart_s,
            failures_per_h=failures,
            reclaims_per_h=reclaims,
        ),
        runs=4_000,
        seed=7,
    )
    rate = failures + reclaims
    expected = useful_h * wall_clock_factor(interval_s, stall_s, restart_s, rate)
    assert made.finished.all()
    error = made.billed_h.std() / math.sqrt(len(made.billed_h))
    assert abs(made.billed_h.mean() - expected) < FOUR_SIGMA * error
    # Interruptions come while the machines run, and at no other time.
    counted = made.interruptions.std() / math.sqrt(len(made.interruptions)) + rate * error
    assert abs(made.interruptions.mean() - rate * expected) < FOUR_SIGMA * counted
    saving = useful_h * HOUR / interval_s * stall_s / HOUR
    np.testing.assert_allclose(made.billed_h, useful_h + saving + made.lost_h, rtol=1e-9)


def test_a_wrong_closed_form_would_be_noticed() -> None:
    """The band of the test above is narrow: a restart that nothing interrupts is off by more."""
    rate, interval, stall, restart = 0.3, 7200.0, 300.0, 1800.0
    made = simulate(
        job(interval_s=interval, stall_s=stall, restart_s=restart, failures_per_h=rate), runs=20_000, seed=7
    )
    per_s = rate / HOUR
    uninterrupted = 100 * (1 / per_s + restart) * math.expm1(per_s * (interval + stall)) / interval
    error = made.billed_h.std() / math.sqrt(len(made.billed_h))
    assert abs(made.billed_h.mean() - uninterrupted) > FOUR_SIGMA * error


def test_the_spread_is_that_of_a_compound_poisson_sum() -> None:
    """N E[L²], where a restart and an even share of an interval are lost, as the planner has it."""
    made = simulate(job(useful_s=1000 * HOUR, failures_per_h=0.02), runs=20_000, seed=3)
    whole, restart = HOUR + 60, 900.0
    variance = 0.02 * made.billed_h.mean() * (restart**2 + restart * whole + whole**2 / 3) / HOUR**2
    assert made.billed_h.std() == pytest.approx(math.sqrt(variance), rel=0.04)


def test_without_interruptions_nothing_is_left_to_chance() -> None:
    made = simulate(job(failures_per_h=0.0), runs=3)
    assert made.elapsed_h.tolist() == made.billed_h.tolist() == [pytest.approx(100 + 100 * 60 / HOUR)] * 3
    assert made.lost_h.tolist() == made.interruptions.tolist() == [0.0] * 3
    assert made.jobs.tolist() == [1.0] * 3
    assert made.distribution("elapsed_h").p10 == made.distribution("elapsed_h").p90


def test_a_last_interval_may_be_shorter_and_ends_with_a_save() -> None:
    made = simulate(job(useful_s=2.5 * HOUR, failures_per_h=0.0), runs=1)
    assert made.billed_h[0] * HOUR == pytest.approx(2.5 * HOUR + 3 * 60)
    longer = simulate(job(useful_s=2.5 * HOUR, interval_s=99 * HOUR, failures_per_h=0.0), runs=1)
    assert longer.billed_h[0] * HOUR == pytest.approx(2.5 * HOUR + 60)


def test_jobs_end_at_their_limit_and_the_next_goes_on() -> None:
    """10,000 s of work, saves of 10 s at 3,000, 6,000, 9,000 and the end; jobs of 4,100 s that start for 100 s.

    The first computes 3,000 + 990 s and saves, the second to 6,000 and 1,980 s more, the third the rest.
    """
    made = simulate(
        job(useful_s=10_000, interval_s=3_000, stall_s=10, failures_per_h=0.0, startup_s=100, max_run_s=4_100), runs=2
    )
    assert made.jobs.tolist() == [3.0, 3.0]
    assert (made.billed_h * HOUR).tolist() == [pytest.approx(4_110 + 4_110 + 100 + 2_020 + 20)] * 2
    assert made.lost_h.tolist() == [pytest.approx(0.0, abs=1e-9)] * 2


def test_what_is_computed_before_a_limit_is_kept_and_before_an_interruption_lost() -> None:
    """Jobs shorter than an interval get on by the save at their end alone."""
    made = simulate(job(interval_s=100 * HOUR, failures_per_h=0.0, startup_s=600, max_run_s=2 * HOUR), runs=1)
    assert made.jobs[0] == math.ceil(100 * HOUR / (2 * HOUR - 600))
    failing = simulate(job(interval_s=100 * HOUR, failures_per_h=0.2, startup_s=600, max_run_s=2 * HOUR), runs=200)
    assert failing.finished.all()
    assert failing.lost_h.mean() > 10


def test_a_limit_counts_the_time_of_restarts_and_of_lost_work() -> None:
    limited = job(failures_per_h=0.3, startup_s=600, max_run_s=5 * HOUR)
    made = simulate(limited, runs=500)
    most = made.jobs * (5 * HOUR + 60) / HOUR
    assert (made.billed_h <= most + 1e-9).all()
    assert (made.billed_h > (made.jobs - 1) * 5).all()


def test_only_the_start_of_a_job_is_a_start_up() -> None:
    """With saves all the time, next to nothing but restarts is lost."""
    made = simulate(job(interval_s=60, stall_s=0, failures_per_h=0.05, startup_s=600), runs=500)
    assert made.lost_h.sum() == pytest.approx(made.interruptions.sum() * (900 + 30) / HOUR, rel=0.03)
    np.testing.assert_allclose(made.billed_h, 100 + 600 / HOUR + made.lost_h, atol=600 / HOUR)


def test_a_hopeless_interval_never_ends() -> None:
    made = simulate(job(interval_s=100 * HOUR, failures_per_h=0.5), runs=50)
    assert wall_clock_factor(100 * HOUR, 60, 900, 0.5) > 20
    assert not made.finished.any()
    assert np.isinf(made.elapsed_h).all()
    assert math.isinf(made.distribution("billed_h").p10)
    assert math.isfinite(made.interruptions.mean())


def test_runs_that_never_end_leave_the_quantiles_of_the_others() -> None:
    """Of a mixture of a good and a hopeless rate, the 10th percentile is a number and the 90th is not."""
    rates = GammaMixture((0.5, 0.5), (Gamma(1e8, 1e10), Gamma(1e8, 1e8)))
    made = simulate(job(interval_s=50 * HOUR, failures_per_h=rates), runs=300)
    assert made.finished.mean() == pytest.approx(0.5, abs=0.12)
    assert math.isfinite(made.distribution("elapsed_h").p10)
    assert math.isinf(made.distribution("elapsed_h").p90)


def test_waits_take_time_and_no_money() -> None:
    without = simulate(job(reclaims_per_h=0.1, failures_per_h=0.0), runs=500, seed=5)
    waiting = simulate(job(reclaims_per_h=0.1, failures_per_h=0.0, wait_s=1800), runs=500, seed=5)
    assert np.array_equal(without.billed_h, waiting.billed_h)
    np.testing.assert_allclose(waiting.elapsed_h - waiting.billed_h, 0.5 * (1 + waiting.interruptions))
    failures_only = simulate(job(wait_s=1800), runs=100)
    assert np.array_equal(failures_only.elapsed_h, failures_only.billed_h)


def test_reclaims_and_failures_come_in_proportion() -> None:
    made = simulate(job(failures_per_h=0.03, reclaims_per_h=0.09, wait_s=HOUR), runs=4_000)
    waits = (made.elapsed_h - made.billed_h - 1).sum()
    assert waits / made.interruptions.sum() == pytest.approx(0.75, abs=0.01)


def test_a_drawn_rate_has_the_mean_of_its_distribution_and_more_spread() -> None:
    rates = failure_rate().scaled(64)
    fixed, drawn = simulate(job(failures_per_h=rates.mean), seed=2), simulate(job(failures_per_h=rates), seed=2)
    assert drawn.interruptions.mean() == pytest.approx(fixed.interruptions.mean(), rel=0.05)
    assert drawn.interruptions.std() > 1.2 * fixed.interruptions.std()


def test_a_spread_meets_its_percentiles() -> None:
    drawn = Spread(p10=300, p50=900, p90=1800).draw(np.random.default_rng(0), 200_000)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([300, 900, 1800], rel=0.02)


def test_a_restart_drawn_once_a_run_spreads_wider_than_one_drawn_every_time() -> None:
    each = simulate(job(failures_per_h=0.3, restart_s=Spread(p10=300, p50=900, p90=1800)), seed=1)
    once = simulate(job(failures_per_h=0.3, restart_s=Spread(p10=300, p50=900, p90=1800, per_run=True)), seed=1)
    assert once.billed_h.std() > 1.5 * each.billed_h.std()
    assert once.billed_h.mean() == pytest.approx(each.billed_h.mean(), rel=0.02)


def test_an_error_of_the_step_time_scales_the_work() -> None:
    made = simulate(job(failures_per_h=0.0, stall_s=0.0, step_spread=0.2), runs=20_000)
    assert made.distribution("elapsed_h").p90 == pytest.approx(100 * math.exp(0.2 * 1.2816), rel=0.01)
    assert made.distribution("elapsed_h").p10 == pytest.approx(100 * math.exp(-0.2 * 1.2816), rel=0.01)


def test_a_seed_gives_the_same_runs() -> None:
    first, again, other = (simulate(job(), runs=50, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.elapsed_h, again.elapsed_h)
    assert not np.array_equal(first.elapsed_h, other.elapsed_h)


def test_a_job_that_only_starts_up_is_refused() -> None:
    with pytest.raises(ValueError, match="max_run_s=600 is no longer than startup_s=600"):
        simulate(job(startup_s=600, max_run_s=600))


def test_ten_thousand_runs_of_six_weeks_take_seconds() -> None:
    six_weeks = job(
        useful_s=42 * 24 * HOUR,
        interval_s=4200,
        stall_s=27,
        restart_s=Spread(p10=300, p50=900, p90=1800),
        failures_per_h=failure_rate().scaled(128),
        reclaims_per_h=0.023,
        wait_s=Spread(p10=300, p50=1800, p90=21600),
        startup_s=600,
        max_run_s=120 * HOUR,
    )
    start = time.process_time()
    made = simulate(six_weeks)
    assert time.process_time() - start < 5
    assert made.finished.all()
    assert made.interruptions.mean() > 30


def test_numpy_is_loaded_by_a_simulation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; import chimera_sm.planner.simulate; from chimera_sm.planner.plan import plan;"
        "from chimera_sm.recipe.compose import compose; plan(compose(['recipe=70b'])); print('numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match="needs numpy"):
        simulate(job(), runs=1)
