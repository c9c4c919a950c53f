"""Monte Carlo of a run: interruptions, lost work, restarts, waits and job limits, thousands of runs at once.

It draws what `wall_clock_factor` takes the mean of, so it also has the spread, and it knows what the formula does not:
rates and restarts that differ between runs, jobs that end at a limit, a last interval that is shorter. A plan does not
need it (and must not wait for numpy); tests hold the plan's formulas to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chimera_sm.errors import UsageError

from .gamma import GammaMixture
from .spread import MAX_INFLATION, Z90
from .types import Distribution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A duration in seconds that is not the same every time: lognormal, with a spread of its own on either side of the
    median, so that all three percentiles are met."""

    p10: float
    p50: float
    p90: float
    per_run: bool = False
    """True: one draw a run, for what is unknown about the machines; False: a new draw every time it happens."""

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        import numpy as np

        z = rng.standard_normal(count)
        sigma = np.where(z < 0, math.log(self.p50 / self.p10), math.log(self.p90 / self.p50)) / Z90
        drawn: Floats = self.p50 * np.exp(sigma * z)
        return drawn


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """What is run and what interrupts it. Times in seconds, rates of the whole job an hour."""

    useful_s: float
    """Computing that must be done once, without saves."""
    interval_s: float
    """Computing between two saves; the last interval may be shorter. The run ends with a save."""
    stall_s: float
    """A save."""
    restart_s: float | Spread
    """Detect, replace and reload; an interruption can hit it, and then it begins again."""
    failures_per_h: float | GammaMixture
    """A distribution is drawn from once a run."""
    reclaims_per_h: float = 0.0
    wait_s: float | Spread = 0.0
    """For capacity, after a reclaim and, where reclaims happen, before every job: elapsed, not billed."""
    startup_s: float = 0.0
    """From a job's first billed second to its first step."""
    max_run_s: float = math.inf
    """A job ends after so long; it saves then, and the next goes on."""
    step_spread: float = 0.0
    """Standard deviation of the logarithm of a run's step time: `useful_s` and `interval_s` grow together."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRuns:
    """One value a run. Hours are infinite where the run was given up (`finished` is false)."""

    elapsed_h: Floats = field(repr=False)
    """Until the end, waits for capacity too."""
    billed_h: Floats = field(repr=False)
    """On the machines."""
    lost_h: Floats = field(repr=False)
    """Billed for nothing: work that was done again, saves that were cut off, and restarts."""
    interruptions: Floats = field(repr=False)
    jobs: Floats = field(repr=False)
    finished: Bools = field(repr=False)

    def distribution(self, name: str) -> Distribution:
        """Percentiles of `elapsed_h`, `billed_h`, `lost_h`, `interruptions` or `jobs` over all runs."""
        import numpy as np

        # Without interpolation: between a run that ended and one that never does, there is no number.
        p10, p50, p90 = np.quantile(getattr(self, name), [0.1, 0.5, 0.9], method="inverted_cdf")
        return Distribution(p10=float(p10), p50=float(p50), p90=float(p90))


def simulate(job: SimulatedJob, *, runs: int = 10_000, seed: int = 0) -> SimulatedRuns:
    """Simulate `runs` runs; the same seed gives the same runs.

    A run that takes more than `MAX_INFLATION` times what it would without interruptions is given up. Raises UsageError
    without numpy, and ValueError where a job ends before its first step.
    """
    try:
        import numpy as np
    except ImportError:
        raise UsageError("a simulation needs numpy, which is not installed", fix="pip install 'numpy>=1.26'") from None
    if job.max_run_s <= job.startup_s:
        raise ValueError(f"max_run_s={job.max_run_s:g} is no longer than startup_s={job.startup_s:g}")
    return _Simulation(job, np.random.default_rng(seed), runs).run()


class _Simulation:
    """The state of all runs, one array element each.

    A stretch is the time from a start or restart to the next event: an interruption, the job's limit, or the end.
    Exponential times have no memory, so each stretch draws the time to its interruption anew.
    """

    def __init__(self, job: SimulatedJob, rng: np.random.Generator, runs: int):
        import numpy as np

        self.job, self.rng = job, rng
        scale = np.exp(job.step_spread * rng.standard_normal(runs)) if job.step_spread else np.ones(runs)
        self.useful_s = job.useful_s * scale
        self.interval_s = np.minimum(job.interval_s, job.useful_s) * scale
        self.num_saves = np.ceil(self.useful_s / self.interval_s * (1 - 1e-12))
        self.failures_per_s = _draw_rates(job.failures_per_h, rng, runs) / 3600
        self.rate_per_s = self.failures_per_s + job.reclaims_per_h / 3600
        self.fixed = {
            name: value.draw(rng, runs)
            for name, value in (("restart_s", job.restart_s), ("wait_s", job.wait_s))
            if isinstance(value, Spread) and value.per_run
        }
        self.elapsed_s, self.billed_s, self.lost_s = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.done_s = np.zeros(runs)
        """Computing that is saved."""
        self.overhead_s = np.full(runs, float(job.startup_s))
        """What the next stretch begins with: a start-up, or a restart."""
        self.starting = np.ones(runs, dtype=bool)
        """Whether it is a start-up."""
        self.left_s = np.full(runs, float(job.max_run_s))
        """Of the job."""
        self.interruptions, self.jobs = np.zeros(runs), np.ones(runs)
        self.finished = np.zeros(runs, dtype=bool)
        if job.reclaims_per_h:
            self.elapsed_s += self._draw("wait_s", np.arange(runs))

    def run(self) -> SimulatedRuns:
        import numpy as np

        active = np.arange(len(self.useful_s))
        starts = 1 if math.isinf(self.job.max_run_s) else self.job.useful_s / (self.job.max_run_s - self.job.startup_s)
        undisturbed_s = self.useful_s + self.num_saves * self.job.stall_s + (starts + 1) * self.job.startup_s
        while len(active):
            self._stretch(active)
            hopeful = self.billed_s[active] <= MAX_INFLATION * undisturbed_s[active]
            active = active[~self.finished[active] & hopeful]
        never = np.where(self.finished, 1.0, np.inf)
        return SimulatedRuns(
            elapsed_h=self.elapsed_s / 3600 * never,
            billed_h=self.billed_s / 3600 * never,
            lost_h=np.where(self.finished, self.lost_s / 3600, np.inf),
            interruptions=self.interruptions,
            jobs=self.jobs,
            finished=self.finished,
        )

    def _stretch(self, now: NDArray[np.intp]) -> None:
        """One stretch of the runs `now`."""
        import numpy as np

        stall_s = self.job.stall_s
        done_s, useful_s, interval_s = self.done_s[now], self.useful_s[now], self.interval_s[now]
        overhead_s, left_s, rate = self.overhead_s[now], self.left_s[now], self.rate_per_s[now]
        with np.errstate(divide="ignore"):
            cut_s = self.rng.exponential(size=len(now)) / rate
        saves = np.floor(done_s / interval_s * (1 + 1e-12))
        end_s = overhead_s + (useful_s - done_s) + (self.num_saves[now] - saves) * stall_s

        ends = (end_s <= cut_s) & (end_s <= left_s)
        limited = ~ends & (left_s < cut_s)
        cut = ~ends & ~limited
        took_s = np.where(ends, end_s, np.where(limited, left_s, cut_s))

        # What is saved by then: the rest of the interval that was begun, and whole ones.
        computing_s = np.maximum(took_s - overhead_s, 0.0)
        first_s = (saves + 1) * interval_s - done_s
        after_first_s = computing_s - first_s - stall_s
        whole = np.where(after_first_s < 0, 0.0, 1 + np.floor(after_first_s / (interval_s + stall_s)))
        saved_s = np.where(whole > 0, (saves + whole) * interval_s, done_s)
        # At its limit a job saves what it has: the computing since the last save, at most up to the next one.
        since_s = np.where(
            whole > 0, computing_s - (whole * (interval_s + stall_s) + first_s - interval_s), computing_s
        )
        more_s = np.minimum(since_s, np.where(whole > 0, interval_s, first_s))
        saved_s = np.minimum(np.where(limited, saved_s + more_s, saved_s), useful_s)
        saved_s = np.where(ends, useful_s, saved_s)

        took_s = took_s + np.where(limited, stall_s, 0.0)
        progress_s = saved_s - done_s
        in_saves_s = np.where(ends, self.num_saves[now] - saves, whole + limited) * stall_s
        starting_s = np.where(self.starting[now], np.minimum(self.job.startup_s, took_s), 0.0)
        self.lost_s[now] += np.maximum(took_s - progress_s - in_saves_s - starting_s, 0.0)
        self.billed_s[now] += took_s
        self.elapsed_s[now] += took_s
        self.done_s[now] = saved_s
        self.finished[now] |= ends
        self._next_stretch(now[cut], took_s[cut])
        self._next_job(now[limited])

    def _next_stretch(self, cut: NDArray[np.intp], took_s: Floats) -> None:
        """After an interruption, the same job goes on."""
        self.interruptions[cut] += 1
        self.left_s[cut] -= took_s
        self.overhead_s[cut] = self._draw("restart_s", cut)
        self.starting[cut] = False
        if self.job.reclaims_per_h:
            reclaimed = cut[self.rng.random(len(cut)) >= self.failures_per_s[cut] / self.rate_per_s[cut]]
            self.elapsed_s[reclaimed] += self._draw("wait_s", reclaimed)

    def _next_job(self, limited: NDArray[np.intp]) -> None:
        self.jobs[limited] += 1
        self.left_s[limited] = self.job.max_run_s
        self.overhead_s[limited] = self.job.startup_s
        self.starting[limited] = True
        if self.job.reclaims_per_h:
            self.elapsed_s[limited] += self._draw("wait_s", limited)

    def _draw(self, name: str, of: NDArray[np.intp]) -> Any:
        if name in self.fixed:
            return self.fixed[name][of]
        value = getattr(self.job, name)
        return value.draw(self.rng, len(of)) if isinstance(value, Spread) else value


def _draw_rates(rate: float | GammaMixture, rng: np.random.Generator, runs: int) -> Floats:
    import numpy as np

    if not isinstance(rate, GammaMixture):
        return np.full(runs, float(rate))
    which = rng.choice(len(rate.parts), size=runs, p=rate.weights)
    shapes = np.array([part.shape for part in rate.parts])
    exposures = np.array([part.exposure for part in rate.parts])
    drawn: Floats = rng.gamma(shapes[which]) / exposures[which]
    return drawn
