"""How often hosts fail: a prior made of published fleets (`data/fleets.csv`), and what a team's own counts make of it.

A single gamma cannot have the published rates: five of six lie between 1e-4 and 3e-4 failures a node-hour and one, a
new fleet, at 6e-4. So every fleet is a gamma of its own, and the prior says "one like these, each as likely".
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass

from .gamma import Gamma, GammaMixture
from .tables import rows


@dataclass(frozen=True, kw_only=True)
class Fleet:
    name: str
    node_hours: float
    """Of hosts with eight accelerators."""
    failures: int
    source: str
    date: str


@functools.cache
def fleets() -> tuple[Fleet, ...]:
    return tuple(
        Fleet(
            name=row["fleet"],
            node_hours=float(row["node_hours"]),
            failures=int(row["failures"]),
            source=row["source"],
            date=row["date"],
        )
        for row in rows("fleets")
    )


@functools.cache
def failure_prior(exclude: str | None = None) -> GammaMixture:
    """Failures an hour of a host with eight accelerators, of a fleet about which nothing is known.

    Every published fleet is a gamma around its rate. Its relative variance is that of a kernel estimate of the density
    of log rates (Silverman's rule, h = 0.9 s n^(-1/5)) plus that of its own count, 1 / failures.

    `exclude` leaves a fleet out, so that its record can be predicted from the others. Raises ValueError where there is
    no fleet of that name.
    """
    known = fleets()
    if exclude is not None and exclude not in {fleet.name for fleet in known}:
        raise ValueError(f"{exclude!r} is none of the fleets {', '.join(fleet.name for fleet in known)}")
    taken = [fleet for fleet in known if fleet.name != exclude]
    spread = statistics.stdev(math.log(fleet.failures / fleet.node_hours) for fleet in taken)
    kernel = 0.9 * spread * len(taken) ** -0.2
    shapes = [1 / (kernel**2 + 1 / fleet.failures) for fleet in taken]
    return GammaMixture(
        (1 / len(taken),) * len(taken),
        tuple(
            Gamma(shape, shape * fleet.node_hours / fleet.failures) for shape, fleet in zip(shapes, taken, strict=True)
        ),
    )


@functools.cache
def failure_rate(count: int = 0, node_hours: float = 0.0, exclude: str | None = None) -> GammaMixture:
    """The prior after a team counted `count` failures in `node_hours` (hosts of eight accelerators × hours)."""
    return failure_prior(exclude).updated(count, node_hours)


@functools.cache
def failure_quantile(percentile: str, count: int = 0, node_hours: float = 0.0, exclude: str | None = None) -> float:
    """Of `failure_rate`, at "p10", "" (the median) or "p90"."""
    return failure_rate(count, node_hours, exclude).quantile({"p10": 0.1, "": 0.5, "p90": 0.9}[percentile])
