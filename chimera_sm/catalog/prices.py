"""Prices, spot history and offerings of a type in a region."""

from __future__ import annotations

from dataclasses import dataclass

from .instances import instance
from .regions import region as known_region
from .tables import by_type_and_region, number, rows


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars an hour of one host, as a SageMaker training job. None is unknown; the basis says why, or from what."""

    type: str
    region: str
    on_demand_usd_h: float | None
    on_demand_basis: str
    on_demand_date: str
    spot_low_usd_h: float | None
    """In the cheapest zone."""
    spot_usd_h: float | None
    """In the median zone. Managed spot bills the on-demand rate for fewer seconds; this is the equivalent rate."""
    spot_basis: str
    spot_date: str
    training_plan_usd_h: float | None
    training_plan_basis: str
    training_plan_date: str


@dataclass(frozen=True, kw_only=True)
class SpotHistory:
    """AWS's spot advisor: a snapshot of the month before `date`."""

    bucket: str
    """Share of instances interrupted in a month: `<5%`, `5-10%`, `10-15%`, `15-20%`, `>20%`."""
    savings_percent: float
    """Over EC2 on-demand."""
    date: str


def price(type: str, region: str) -> Price:
    """Raises UnknownInstance and UnknownRegion; a known pair without prices has None and a basis that says so."""
    instance(type)
    known_region(region)
    row = by_type_and_region("prices").get((type, region))
    if row is None:
        unknown = "unknown: the catalogue has no price of this type in this region"
        return Price(
            type=type,
            region=region,
            on_demand_usd_h=None,
            on_demand_basis=unknown,
            on_demand_date="",
            spot_low_usd_h=None,
            spot_usd_h=None,
            spot_basis=unknown,
            spot_date="",
            training_plan_usd_h=None,
            training_plan_basis=unknown,
            training_plan_date="",
        )
    return Price(
        type=type,
        region=region,
        on_demand_usd_h=number(row["on_demand_usd_h"]),
        on_demand_basis=row["on_demand_basis"],
        on_demand_date=row["on_demand_date"],
        spot_low_usd_h=number(row["spot_low_usd_h"]),
        spot_usd_h=number(row["spot_usd_h"]),
        spot_basis=row["spot_basis"],
        spot_date=row["spot_date"],
        training_plan_usd_h=number(row["training_plan_usd_h"]),
        training_plan_basis=row["training_plan_basis"],
        training_plan_date=row["training_plan_date"],
    )


def offered(type: str, region: str) -> bool | None:
    """Whether EC2 offered the type in the region when the table was made; None where the table covers one of them not
    at all. SageMaker's own offer can be narrower."""
    instance(type)
    known_region(region)
    if (type, region) in by_type_and_region("offerings"):
        return True
    covered = any(row["type"] == type for row in rows("offerings")) and any(
        row["region"] == region for row in rows("offerings")
    )
    return False if covered else None


def spot_history(type: str, region: str) -> SpotHistory | None:
    instance(type)
    known_region(region)
    row = by_type_and_region("spot").get((type, region))
    if row is None:
        return None
    return SpotHistory(bucket=row["bucket"], savings_percent=float(row["savings_percent"]), date=row["date"])


def spot_bucket(type: str, region: str) -> str | None:
    """The advisor's monthly interruption bucket, or None where it lists no such pair."""
    history = spot_history(type, region)
    return history.bucket if history else None
