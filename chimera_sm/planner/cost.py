"""Days and dollars of the whole run, for each kind of capacity, as a spread rather than a number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from chimera_sm.catalog import Instance, Price

from .coefficients import coefficient
from .reliability import Interruptions, failure_rate_per_h, reclaim_rate_per_h, wall_clock_factor
from .segments import count
from .types import CostEstimate, Distribution

Kind = Literal["on_demand", "spot", "reserved"]
KINDS: tuple[Kind, ...] = ("on_demand", "spot", "reserved")
MAX_INFLATION = 20.0
"""Running time over useful time beyond which a run is called one that would not finish: the formula goes on to say
"in so many million days", and nobody waits for that."""
Z90 = 1.2816
"""Standard normal at the 90th percentile."""


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


def interruptions(run: RunShape, kind: Kind, percentile: str = "") -> Interruptions:
    return Interruptions(
        failures_per_h=failure_rate_per_h(run.hosts, run.instance.accelerators, percentile),
        reclaims_per_h=reclaim_rate_per_h(run.hosts, run.spot_bucket) if kind == "spot" else 0.0,
    )


def duration(run: RunShape, kind: Kind, percentile: str = "") -> Duration | None:
    """Of the whole run at one percentile ("p10", "p90", or "" for the median); None without a step time, or where
    interruptions come too fast for it ever to end, or its jobs end before their first step."""
    if run.step_s is None:
        return None
    z = {"p10": -Z90, "": 0.0, "p90": Z90}[percentile]
    step_s = run.step_s * math.exp(z * run.spread)
    rates = interruptions(run, kind, percentile)
    interval_s = (run.interval_steps or run.num_steps) * step_s
    restart_s = coefficient("restart_s", percentile)
    factor = wall_clock_factor(interval_s, run.stall_s, restart_s, rates.per_h)
    startup_s = coefficient("startup_s")
    if factor > MAX_INFLATION or run.max_run_s <= startup_s:
        return None
    training_s = run.num_steps * step_s * factor
    starts = count(run.num_steps, training_s / run.num_steps, startup_s, run.max_run_s)
    billed_s = training_s + starts * startup_s
    waits = (rates.reclaims_per_h or 0.0) * billed_s / 3600 + (starts if kind == "spot" else 0)
    waited_s = waits * coefficient("spot_wait_s", percentile)
    return Duration(training_h=training_s / 3600, billed_h=billed_s / 3600, elapsed_h=(billed_s + waited_s) / 3600)


def estimate_cost(run: RunShape, kind: Kind, chosen: bool, price: Price, no_step_reason: str) -> CostEstimate:
    """One kind of capacity. Dollars are billed hours × hosts × the rate; the waits of spot cost nothing.

    The ends take step time, failures, restarts, waits and price to their 10th or 90th percentile together, so the band
    is wider than 80%.
    """
    rates, basis = _rates(price, kind)
    if kind == "spot" and run.spot_bucket is None:
        basis += "; reclaims unknown and left out"
    spans = [duration(run, kind, percentile) for percentile in ("p10", "", "p90")]
    known = [span for span in spans if span is not None]
    if run.step_s is None:
        basis += f"; run length unknown: {no_step_reason}"
    elif run.max_run_s <= coefficient("startup_s"):
        basis += "; would not finish: a job ends before its first step"
    elif spans[1] is None:
        basis += f"; would not finish on {kind.replace('_', '-')} at this interruption rate"
    elif len(known) < 3:
        basis += "; run length unknown: might not finish, at the 90th percentile of the interruption rate"
    days = usd = None
    if len(known) == 3:
        days = _distribution([span.elapsed_h / 24 for span in known])
        if rates is not None:
            usd = _distribution([span.billed_h * run.hosts * rate for span, rate in zip(known, rates, strict=True)])
    return CostEstimate(
        kind=kind,
        chosen=chosen,
        usd_per_hour=None if rates is None else rates[1] * run.hosts,
        price_basis=basis,
        usd=usd,
        days=days,
        would_finish=None if run.step_s is None else spans[1] is not None,
    )


def _rates(price: Price, kind: Kind) -> tuple[tuple[float, float, float] | None, str]:
    """Dollars an hour of a host, low, middle and high, and where they come from."""
    if kind == "on_demand":
        rate, basis, date = price.on_demand_usd_h, price.on_demand_basis, price.on_demand_date
    elif kind == "reserved":
        rate, basis, date = price.training_plan_usd_h, price.training_plan_basis, price.training_plan_date
    else:
        rate, basis, date = price.spot_usd_h, price.spot_basis, price.spot_date
    basis += f" ({date})" if date else ""
    if rate is None:
        return None, basis
    if kind == "spot":
        high = rate * coefficient("spot_price_high")
        ceiling = price.on_demand_usd_h if price.on_demand_usd_h is not None else high
        return (price.spot_low_usd_h or rate, rate, max(rate, min(high, ceiling))), basis
    return (rate, rate, rate), basis


def _distribution(values: list[float]) -> Distribution:
    return Distribution(p10=values[0], p50=values[1], p90=values[2])
