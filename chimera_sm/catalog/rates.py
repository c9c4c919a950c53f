"""What a host costs an hour, by service (EC2, a SageMaker training job, HyperPod) and by how its capacity is bought."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from .instances import instance
from .prices import price
from .regions import region as known_region
from .tables import Row, number, rows

Service = Literal["ec2", "training_job", "hyperpod"]
RateKind = Literal["on_demand", "spot", "savings_plan", "reserved", "capacity_block"]
"""`reserved`: a SageMaker training plan. `capacity_block`: EC2 Capacity Blocks for ML."""

SOLD: dict[Service, tuple[RateKind, ...]] = {
    "ec2": ("on_demand", "spot", "savings_plan", "capacity_block"),
    "training_job": ("on_demand", "spot", "savings_plan", "reserved"),
    "hyperpod": ("on_demand", "spot", "savings_plan", "reserved"),
}
"""Training plans are SageMaker's, capacity blocks EC2's; each is what the other is for its own service."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Dollars an hour of one host. None is unknown; the basis says why, or from what."""

    service: Service
    kind: RateKind
    usd_h: float | None
    low_usd_h: float | None
    """Spot only: in the cheapest zone, where `usd_h` is of the median one."""
    basis: str
    date: str

    @property
    def source(self) -> str:
        """The basis with its date."""
        return f"{self.basis} ({self.date})" if self.date else self.basis


@functools.cache
def rate(type: str, region: str, service: Service, kind: RateKind) -> Rate:
    """The rate of a type in a region. Raises UnknownInstance and UnknownRegion, and KeyError for what a service does
    not sell (`SOLD`).

    >>> rate("ml.p5.48xlarge", "us-east-1", "hyperpod", "on_demand").usd_h
    66.048
    """
    instance(type)
    known_region(region)
    if kind not in SOLD[service]:
        raise KeyError(f"{service} sells no {kind}")
    if service == "training_job" and kind != "savings_plan":
        return _of_training_job(type, region, kind)
    row = _row(service, kind, type, region)
    if service == "hyperpod" and kind == "on_demand" and not row["usd_h"]:
        return _by_premium(type, region) or _rate(row)
    return _rate(row)


def _rate(row: Row) -> Rate:
    return Rate(
        service=row["service"],  # type: ignore[arg-type]
        kind=row["kind"],  # type: ignore[arg-type]
        usd_h=number(row["usd_h"]),
        low_usd_h=number(row["low_usd_h"]),
        basis=row["basis"],
        date=row["date"],
    )


@functools.cache
def _table() -> dict[tuple[str, str, str, str], Row]:
    return {(row["service"], row["kind"], row["type"], row["region"]): row for row in rows("rates")}


def _row(service: Service, kind: RateKind, type: str, region: str) -> Row:
    """The row of just this pair, or the one that says why there is none."""
    table = _table()
    return table.get((service, kind, type, region)) or table[service, kind, "*", "*"]


def _of_training_job(type: str, region: str, kind: RateKind) -> Rate:
    found = price(type, region)
    if kind == "on_demand":
        value, low, basis, date = found.on_demand_usd_h, None, found.on_demand_basis, found.on_demand_date
    elif kind == "spot":
        value, low, basis, date = found.spot_usd_h, found.spot_low_usd_h, found.spot_basis, found.spot_date
    else:
        value, low, basis, date = found.training_plan_usd_h, None, found.training_plan_basis, found.training_plan_date
    return Rate(service="training_job", kind=kind, usd_h=value, low_usd_h=low, basis=basis, date=date)


def premium(type: str, service: Service) -> tuple[float, str] | None:
    """What a service asks for the hour of EC2, as a factor, and where it was seen; None where it was not."""
    for row in rows("premiums"):
        if row["service"] == service and fnmatchcase(type, row["pattern"]):
            return float(row["multiplier"]), f"{row['basis']} ({row['date']})"
    return None


def _by_premium(type: str, region: str) -> Rate | None:
    ec2, factor = rate(type, region, "ec2", "on_demand"), premium(type, "hyperpod")
    if ec2.usd_h is None or factor is None:
        return None
    return Rate(
        service="hyperpod",
        kind="on_demand",
        usd_h=round(ec2.usd_h * factor[0], 4),
        low_usd_h=None,
        basis=f"derived: EC2 on-demand {ec2.usd_h:g} ({ec2.basis}) x {factor[0]:g} HyperPod premium, {factor[1]}",
        date=ec2.date,
    )
