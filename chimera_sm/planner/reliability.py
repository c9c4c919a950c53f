"""What interrupts a run and how often, what an interruption costs, and how often to save.

Failures and spot reclaims are taken as Poisson processes whose rates add over hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chimera_sm.recipe.schema import FailureRecord

from .coefficients import coefficient
from .fleets import failure_quantile, failure_rate
from .gamma import GammaMixture
from .spread import MAX_INFLATION, Percentile
from .types import Distribution, ReliabilityEstimate

HOURS_A_MONTH = 730.0


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Rates of the whole job, an hour."""

    failures_per_h: float
    reclaims_per_h: float | None
    """None: spot, and the advisor lists no such type in the region. 0: not spot."""

    @property
    def per_h(self) -> float:
        return self.failures_per_h + (self.reclaims_per_h or 0.0)


def node_equivalents(hosts: int, accelerators_per_host: int) -> float:
    """Hosts of eight accelerators, for which failure rates are stated: a smaller host fails less often."""
    return hosts * accelerators_per_host / 8


def job_failure_rate(hosts: int, accelerators_per_host: int, seen: FailureRecord) -> GammaMixture:
    """Hardware failures of the job an hour: published fleets, updated by what the team's own has shown."""
    return failure_rate(seen.count, seen.node_hours).scaled(node_equivalents(hosts, accelerators_per_host))


def failure_rate_per_h(
    hosts: int, accelerators_per_host: int, percentile: Percentile = "", seen: FailureRecord | None = None
) -> float:
    """One percentile of `job_failure_rate`."""
    seen = seen or FailureRecord()
    rate = failure_quantile(percentile, seen.count, seen.node_hours)
    return rate * node_equivalents(hosts, accelerators_per_host)


def reclaim_rate_per_h(hosts: int, bucket: str | None) -> float | None:
    """Spot reclaims of the job an hour, from the advisor's monthly share p of interrupted instances: -ln(1 - p) / 730
    for a host. One reclaimed host stops the job."""
    if bucket is None:
        return None
    return -math.log1p(-coefficient("spot_monthly_share", bucket)) / HOURS_A_MONTH * hosts


def checkpoint_stall_s(checkpoint_gb: float, hosts: int) -> float:
    """Time that training stands still while every host writes its share."""
    return coefficient("checkpoint_fixed_s") + checkpoint_gb / hosts / coefficient("checkpoint_gb_s_host")


def young_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Young's interval between checkpoints (1974), sqrt(2 C M): the lost work and the saving cost the same."""
    return math.sqrt(2 * stall_s * mean_time_between_s)


def daly_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's interval between checkpoints (2006): sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C, and M where a
    save takes 2 M or more. Within 1% of the best interval of `wall_clock_factor` while C < M / 2."""
    ratio = stall_s / (2 * mean_time_between_s)
    if ratio >= 1:
        return mean_time_between_s
    return young_interval_s(stall_s, mean_time_between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def wall_clock_factor(interval_s: float, stall_s: float, restart_s: float, rate_per_h: float) -> float:
    """Running time over useful time: exp(λR) (exp(λ (τ + C)) - 1) / (λ τ).

    The expected time to get through an interval τ and its save C when interruptions (λ) lose it and cost a restart R,
    which an interruption can hit as well (the complete model of Daly 2006). It holds for any rate; infinity where an
    interval is hopeless.
    """
    rate = rate_per_h / 3600
    if rate == 0:
        return (interval_s + stall_s) / interval_s
    exponent = rate * (interval_s + stall_s)
    if exponent + rate * restart_s > 50:
        return math.inf
    return math.exp(rate * restart_s) * math.expm1(exponent) / (rate * interval_s)


def estimate_reliability(
    *,
    interruptions: Interruptions,
    failures: GammaMixture,
    seen: FailureRecord,
    spot_bucket: str | None,
    interval_steps: int,
    num_steps: int,
    step_s: float | None,
    stall_s: float,
    days: float | None,
) -> ReliabilityEstimate:
    """What to expect of the chosen kind of capacity. `days` is the median of the run's length; `failures` are an hour
    of the whole job."""
    per_day = 24 * interruptions.failures_per_h
    reclaims = None if interruptions.reclaims_per_h is None else 24 * interruptions.reclaims_per_h
    young = daly = effective = None
    if step_s is not None:
        between_s = 3600 / interruptions.per_h
        young = _steps(young_interval_s(stall_s, between_s), step_s, num_steps)
        daly = _steps(daly_interval_s(stall_s, between_s), step_s, num_steps)
        factor = wall_clock_factor(
            (interval_steps or num_steps) * step_s, stall_s, coefficient("restart_s"), interruptions.per_h
        )
        effective = 1 / factor if factor <= MAX_INFLATION else None
    basis = "failures as in published fleets of A100, H100 and B200 (fleets.csv)"
    if seen.node_hours:
        basis += f", updated by capacity.failures: {seen.count:,} in {seen.node_hours:,.0f} node-hours"
    basis += f"; a save stalls training for {stall_s:.0f} s"
    if reclaims is None:
        basis += "; spot reclaims unknown and left out"
    elif reclaims > 0:
        basis += f"; spot reclaims {reclaims:.2g} a day by the advisor's bucket"
    return ReliabilityEstimate(
        failures_per_day=per_day,
        failures_expected=None if days is None else per_day * days,
        spot_interruption_bucket=spot_bucket,
        checkpoint_interval_steps=interval_steps,
        recommended_interval_steps=daly,
        basis=basis,
        failures=None if days is None else _counts(failures, 24 * days),
        reclaims_per_day=reclaims,
        reclaims_expected=None if days is None or reclaims is None else reclaims * days,
        young_interval_steps=young,
        effective_share=effective,
    )


def _steps(interval_s: float, step_s: float, num_steps: int) -> int:
    return max(1, min(num_steps, round(interval_s / step_s)))


def _counts(failures: GammaMixture, hours: float) -> Distribution:
    p10, p50, p90 = (float(failures.count_quantile(p, hours)) for p in (0.1, 0.5, 0.9))
    return Distribution(p10=p10, p50=p50, p90=p90)
