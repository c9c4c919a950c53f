"""Prices of storage by the month, and of moving data between regions."""

from __future__ import annotations

from dataclasses import dataclass

from chimera_train.config import nearest

from .errors import UnknownTier
from .regions import region as known_region
from .tables import rows


@dataclass(frozen=True, kw_only=True)
class UnitPrice:
    """Dollars of a unit (a GB-month, a GB); None is unknown, and the basis says so."""

    usd: float | None
    basis: str


def fsx_tiers() -> tuple[str, ...]:
    """Deployment type and MB/s per TiB of every FSx for Lustre tier with a price, e.g. `PERSISTENT_2-250`."""
    return tuple(row["tier"] for row in rows("storage_prices") if row["service"] == "fsx")


def fsx_price(tier: str, region: str) -> UnitPrice:
    """Of a GiB of capacity and month (AWS writes GB). Raises UnknownTier and UnknownRegion, which name the
    nearest."""
    if tier not in fsx_tiers():
        raise UnknownTier(tier, nearest(tier, fsx_tiers()), fsx_tiers())
    return _storage("fsx", tier, region)


def s3_price(region: str) -> UnitPrice:
    """Of a GB-month of S3 Standard, at the rate of its first 50 TB. Raises UnknownRegion."""
    return _storage("s3", "STANDARD", region)


def transfer_price(source: str, destination: str) -> UnitPrice:
    """Of a GB copied from one region to another; within a region it costs nothing. Raises UnknownRegion."""
    known_region(source)
    known_region(destination)
    if source == destination:
        return UnitPrice(usd=0.0, basis="free within a region")
    found = {row["to"]: row for row in rows("transfer_prices") if row["from"] == source}
    row = found.get(destination) or found.get("*")
    if row is None:
        return UnitPrice(usd=None, basis=f"unknown: the catalogue has no price of transfer out of {source}")
    return UnitPrice(usd=float(row["usd_gb"]), basis=f"${row['usd_gb']}/GB, {row['basis']} ({row['date']})")


def _storage(service: str, tier: str, region: str) -> UnitPrice:
    known_region(region)
    for row in rows("storage_prices"):
        if (row["service"], row["tier"]) == (service, tier) and region in row["regions"].split():
            basis = f"${row['usd_gb_month']}/GB-month, {row['basis']} ({row['date']})"
            return UnitPrice(usd=float(row["usd_gb_month"]), basis=basis)
    return UnitPrice(usd=None, basis=f"unknown: the catalogue has no price of {service} {tier} in {region}")
