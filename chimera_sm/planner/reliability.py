"""What interrupts a run and how often, what an interruption costs, and how often to save.

Failures and spot reclaims are taken as Poisson processes whose rates add over hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .coefficients import coefficient
from .types import ReliabilityEstimate

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


def failure_rate_per_h(hosts: int, accelerators_per_host: int, percentile: str = "") -> float:
    """Hardware failures of the job an hour. The prior is for hosts of eight accelerators and scales with them."""
    return coefficient("failures_per_host_h", percentile) * hosts * accelerators_per_host / 8


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
    """Young's interval between checkpoints, sqrt(2 C M): the lost work and the saving cost the same."""
    return math.sqrt(2 * stall_s * mean_time_between_s)


def wall_clock_factor(interval_s: float, stall_s: float, restart_s: float, rate_per_h: float) -> float:
    """Running time over useful time: (1/λ + R) (exp(λ (τ + C)) - 1) / τ.

    The expected time to get through an interval τ and its save C when interruptions (λ) lose it and cost a restart R
    (Daly 2006, eq. 13). It holds for any rate; infinity where an interval is hopeless.
    """
    rate = rate_per_h / 3600
    if rate == 0:
        return (interval_s + stall_s) / interval_s
    exponent = rate * (interval_s + stall_s)
    if exponent > 50:
        return math.inf
    return (1 / rate + restart_s) * math.expm1(exponent) / interval_s


def estimate_reliability(
    *,
    interruptions: Interruptions,
    spot_bucket: str | None,
    interval_steps: int,
    num_steps: int,
    step_s: float | None,
    stall_s: float,
    days: float | None,
) -> ReliabilityEstimate:
    """What to expect of the chosen kind of capacity. `days` is the median of the run's length."""
    per_day = 24 * interruptions.failures_per_h
    recommended = None
    if step_s is not None:
        best_s = young_interval_s(stall_s, 3600 / interruptions.per_h)
        recommended = max(1, min(num_steps, round(best_s / step_s)))
    basis = f"failure prior of p4d and p5 fleets; a save stalls training for {stall_s:.0f} s"
    if interruptions.reclaims_per_h is None:
        basis += "; spot reclaims unknown and left out"
    elif interruptions.reclaims_per_h > 0:
        basis += f"; spot reclaims {24 * interruptions.reclaims_per_h:.2g} a day by the advisor's bucket"
    return ReliabilityEstimate(
        failures_per_day=per_day,
        failures_expected=None if days is None else per_day * days,
        spot_interruption_bucket=spot_bucket,
        checkpoint_interval_steps=interval_steps,
        recommended_interval_steps=recommended,
        basis=basis,
    )
