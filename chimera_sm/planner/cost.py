"""Days and dollars of the whole run, for each kind of capacity, as a spread rather than a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from chimera_sm.catalog import SOLD, Instance, Rate, RateKind, Service, rate
from chimera_sm.recipe.schema import FailureRecord

from .coefficients import coefficient
from .reliability import Interruptions, failure_rate_per_h, reclaim_rate_per_h, wall_clock_factor
from .segments import count
from .spread import MAX_INFLATION, Z90, Percentile, band
from .types import CostEstimate, Distribution

KINDS: tuple[RateKind, ...] = ("on_demand", "spot", "savings_plan", "reserved", "capacity_block")
SERVICE_OF_TARGET: dict[str, Service] = {
    "sagemaker": "training_job",
    "batch": "training_job",  # a queue of training jobs
    "hyperpod_eks": "hyperpod",
    "hyperpod_slurm": "hyperpod",
}
MIGHT_NOT_FINISH = "run length unknown: might not finish, at the 90th percentile of the interruption rate"
Percentiles = Mapping[str, Percentile]
"""Cause (`step`, `failures`, `restart`, `wait`) → where it is taken; causes that are not named, at their medians."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What is to be computed, and where."""

    step_s: float | None
    num_steps: int
    interval_steps: int
    """0: saves only at the end."""
    stall_s: float
    hosts: int
    instance: Instance
    num_experts: int
    max_run_s: float
    spot_bucket: str | None
    failures: FailureRecord = field(default_factory=FailureRecord)

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the step time's error."""
        if self.num_experts:
            return coefficient("step_error", "experts")
        return coefficient("step_error", self.instance.family)


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Hours of the whole run."""

    training_h: float
    """With saves, and what interruptions cost; without the start-up of each job."""
    billed_h: float
    """On the machines: training and start-ups."""
    elapsed_h: float
    """Until the end: waits for capacity too."""
    billed_chance_h: float = 0.0
    """Standard deviation by chance alone: how many interruptions come, and when in their intervals."""
    elapsed_chance_h: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How long a run takes on one kind of capacity."""

    days: Distribution | None
    billed_h: float | None
    """Median."""
    billed_ends: tuple[tuple[float, float], ...]
    """Of `billed_h`, with one cause at its 10th and 90th percentile."""
    would_finish: bool | None
    unknown: str
    """Why there are no days; empty where there are."""


def interruptions(run: RunShape, kind: RateKind, percentile: Percentile = "") -> Interruptions:
    return Interruptions(
        failures_per_h=failure_rate_per_h(run.hosts, run.instance.accelerators, percentile, run.failures),
        reclaims_per_h=reclaim_rate_per_h(run.hosts, run.spot_bucket) if kind == "spot" else 0.0,
    )


def duration(run: RunShape, kind: RateKind, at: Percentiles | None = None) -> Duration | None:
    """Of the whole run; None without a step time, or where interruptions come too fast for it ever to end, or its jobs
    end before their first step."""
    if run.step_s is None:
        return None
    at = at or {}
    z = {"p10": -Z90, "": 0.0, "p90": Z90}[at.get("step", "")]
    step_s = run.step_s * math.exp(z * run.spread)
    rates = interruptions(run, kind, at.get("failures", ""))
    interval_s = (run.interval_steps or run.num_steps) * step_s
    restart_s = coefficient("restart_s", at.get("restart", ""))
    factor = wall_clock_factor(interval_s, run.stall_s, restart_s, rates.per_h)
    startup_s = coefficient("startup_s")
    if factor > MAX_INFLATION or run.max_run_s <= startup_s:
        return None
    training_s = run.num_steps * step_s * factor
    starts = count(run.num_steps, training_s / run.num_steps, startup_s, run.max_run_s)
    billed_s = training_s + starts * startup_s
    reclaims = (rates.reclaims_per_h or 0.0) * billed_s / 3600
    wait_s = coefficient("spot_wait_s", at.get("wait", "")) if kind == "spot" else 0.0
    waited_s = (reclaims + starts) * wait_s
    # A compound Poisson sum has the variance N E[L²]. What one interruption loses, L, is a restart and an even share of
    # an interval and its save; a reclaim loses a wait besides.
    whole_s = interval_s + run.stall_s
    lost_squared = restart_s**2 + restart_s * whole_s + whole_s**2 / 3
    billed_variance = rates.per_h * training_s / 3600 * lost_squared
    elapsed_variance = billed_variance + reclaims * (wait_s**2 + 2 * wait_s * (restart_s + whole_s / 2))
    return Duration(
        training_h=training_s / 3600,
        billed_h=billed_s / 3600,
        elapsed_h=(billed_s + waited_s) / 3600,
        billed_chance_h=math.sqrt(billed_variance) / 3600,
        elapsed_chance_h=math.sqrt(elapsed_variance) / 3600,
    )


def forecast(run: RunShape, kind: RateKind, no_step_reason: str) -> Forecast:
    """Median and 80% band: errors of the step time, of the failure rate, of restarts and waits, and chance, combined as
    independent causes (`band`). A wait or a restart is taken to be off in the same way for the whole run.

    This closed form costs microseconds and no import; `simulate` draws the same causes, and a test holds one to the
    other. The save at a job's limit is left out, so intervals nearly as long as a job look worse than they are.
    """
    middle = duration(run, kind)
    causes = ("step", "failures", "restart", "wait") if kind == "spot" else ("step", "failures", "restart")
    unknown = ""
    ends = None
    if run.step_s is None:
        unknown = f"run length unknown: {no_step_reason}"
    elif run.max_run_s <= coefficient("startup_s"):
        unknown = "would not finish: a job ends before its first step"
    elif middle is None:
        unknown = f"would not finish on {kind.replace('_', '-')} at this interruption rate"
    else:
        ends = [(duration(run, kind, {cause: "p10"}), duration(run, kind, {cause: "p90"})) for cause in causes]
        if any(span is None for pair in ends for span in pair):
            unknown = MIGHT_NOT_FINISH
    would_finish = None if run.step_s is None else middle is not None
    if middle is None or ends is None or unknown:
        return Forecast(days=None, billed_h=None, billed_ends=(), would_finish=would_finish, unknown=unknown)
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    elapsed = [(low.elapsed_h, high.elapsed_h) for low, high in known]
    elapsed.append(_chance(middle.elapsed_h, middle.elapsed_chance_h))
    billed = [(low.billed_h, high.billed_h) for low, high in known]
    billed.append(_chance(middle.billed_h, middle.billed_chance_h))
    assert run.step_s is not None
    slower = band(middle.billed_h, billed).p90 / middle.billed_h
    if middle.training_h * slower > MAX_INFLATION * run.num_steps * run.step_s / 3600:
        return Forecast(days=None, billed_h=None, billed_ends=(), would_finish=True, unknown=MIGHT_NOT_FINISH)
    hours = band(middle.elapsed_h, elapsed)
    return Forecast(
        days=Distribution(p10=hours.p10 / 24, p50=hours.p50 / 24, p90=hours.p90 / 24),
        billed_h=middle.billed_h,
        billed_ends=tuple(billed),
        would_finish=would_finish,
        unknown="",
    )


def _chance(middle: float, deviation: float) -> tuple[float, float]:
    relative = Z90 * deviation / middle
    return middle * math.exp(-relative), middle * math.exp(relative)


def estimate_cost(
    run: RunShape, found: Forecast, price: Rate, *, chosen: bool, on_demand_usd_h: float | None
) -> CostEstimate:
    """One kind of capacity of one service. Dollars are billed hours × hosts × the rate; the waits of spot cost nothing.
    `on_demand_usd_h` caps the price of spot."""
    basis = price.source
    if price.kind == "spot" and run.spot_bucket is None:
        basis += "; reclaims unknown and left out"
    if found.unknown:
        basis += f"; {found.unknown}"
    usd = None
    if found.billed_h is not None and price.usd_h is not None:
        low, high = _spot_ends(price, on_demand_usd_h) if price.kind == "spot" else (price.usd_h, price.usd_h)
        # Both are shares of the same product, so a change of the price is one of the hours at the same price.
        price_ends = (found.billed_h * low / price.usd_h, found.billed_h * high / price.usd_h)
        hours = band(found.billed_h, (*found.billed_ends, price_ends))
        each = run.hosts * price.usd_h
        usd = Distribution(p10=hours.p10 * each, p50=hours.p50 * each, p90=hours.p90 * each)
    return CostEstimate(
        kind=price.kind,
        chosen=chosen,
        usd_per_hour=None if price.usd_h is None else price.usd_h * run.hosts,
        price_basis=basis,
        usd=usd,
        days=found.days,
        would_finish=found.would_finish,
        service=price.service,
    )


def estimate_costs(
    run: RunShape, service: Service, chosen: RateKind, region: str, no_step_reason: str
) -> tuple[tuple[CostEstimate, ...], tuple[CostEstimate, ...]]:
    """Every kind of capacity of the plan's service, with EC2's capacity blocks, and all that other services sell.

    Machines fail alike whoever rents them out, so the days are those of the kind of capacity alone.
    """
    type = run.instance.type
    forecasts = {kind: forecast(run, kind, no_step_reason) for kind in KINDS}

    def one(sold_by: Service, kind: RateKind) -> CostEstimate:
        return estimate_cost(
            run,
            forecasts[kind],
            rate(type, region, sold_by, kind),
            chosen=sold_by == service and kind == chosen,
            on_demand_usd_h=rate(type, region, sold_by, "on_demand").usd_h,
        )

    own: list[tuple[Service, RateKind]] = [(service if kind in SOLD[service] else "ec2", kind) for kind in KINDS]
    others = [(other, kind) for other, kinds in SOLD.items() for kind in kinds if (other, kind) not in own]
    return tuple(one(*each) for each in own), tuple(one(*each) for each in others)


def _spot_ends(price: Rate, on_demand_usd_h: float | None) -> tuple[float, float]:
    """Dollars an hour, low and high, of a spot rate that is known."""
    assert price.usd_h is not None
    high = price.usd_h * coefficient("spot_price_high")
    ceiling = on_demand_usd_h if on_demand_usd_h is not None else high
    return price.low_usd_h or price.usd_h, max(price.usd_h, min(high, ceiling))
