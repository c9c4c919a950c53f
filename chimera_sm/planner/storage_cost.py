"""What a run pays beside its machines: the file system, S3, and data that come from another region."""

from __future__ import annotations

from collections.abc import Iterator

from chimera_sm import catalog
from chimera_sm.recipe.schema import Recipe

from .disk import GB, checkpoint_gb
from .types import CostEstimate, CostPart, Distribution, TotalCost

DAYS_A_MONTH = 365 / 12
BILLED_GB = 2**30
"""Bytes of what AWS bills as a GB."""


def total_cost(recipe: Recipe, num_parameters: int, chosen: CostEstimate) -> TotalCost:
    """Of the run on the chosen kind of capacity. What the recipe or the catalogue does not say is unknown, and so is
    then the total. Requests to S3, logs and NAT traffic are not counted.

    The percentiles of the parts add up as they are: all of them follow the length of the run.
    """
    machines = CostPart(name="machines", usd=chosen.usd, basis=chosen.price_basis)
    parts = (machines, *_storage(recipe, num_parameters, chosen.days), *_transfer(recipe))
    known = [part.usd for part in parts if part.usd is not None]
    unknown = tuple(part.name for part in parts if part.usd is None)
    known_usd = None
    if known:
        known_usd = Distribution(
            p10=sum(usd.p10 for usd in known), p50=sum(usd.p50 for usd in known), p90=sum(usd.p90 for usd in known)
        )
    return TotalCost(parts=parts, usd=None if unknown else known_usd, known_usd=known_usd, unknown=unknown)


def _storage(recipe: Recipe, num_parameters: int, days: Distribution | None) -> Iterator[CostPart]:
    env, data = recipe.env, recipe.data
    if data.location == "fsx" or recipe.checkpoint.storage == "shared":
        missing = [key for key in ("fsx_tier", "fsx_capacity_gib") if getattr(env, key) is None]
        if env.fsx_tier is None or env.fsx_capacity_gib is None:
            keys = " and ".join(f"env.{key}" for key in missing)
            yield CostPart(name="fsx", usd=None, basis=f"unknown: the recipe does not say {keys}")
        else:
            price = catalog.fsx_price(env.fsx_tier, env.region)
            what = f"{env.fsx_capacity_gib:,} GiB of {env.fsx_tier} for the days of the run"
            yield _monthly("fsx", env.fsx_capacity_gib, price, days, what)
    if recipe.checkpoint.storage == "per_host":
        kept = recipe.checkpoint.keep_last
        size = kept * checkpoint_gb(num_parameters) * GB / BILLED_GB
        what = f"{kept} checkpoints, {size:,.0f} GB"
        yield _monthly("s3_checkpoints", size, catalog.s3_price(env.region), days, what)
    if data.location == "s3":
        if data.size_gb is None:
            yield CostPart(name="s3_data", usd=None, basis="unknown: the recipe does not say data.size_gb")
        else:
            size = data.size_gb * GB / BILLED_GB
            yield _monthly("s3_data", size, catalog.s3_price(env.region), days, f"{size:,.0f} GB of shards")


def _monthly(name: str, billed_gb: float, price: catalog.UnitPrice, days: Distribution | None, what: str) -> CostPart:
    if price.usd is None:
        return CostPart(name=name, usd=None, basis=price.basis)
    if days is None:
        return CostPart(name=name, usd=None, basis=f"unknown: how long the run takes; {what} at {price.basis}")
    a_day = billed_gb * price.usd / DAYS_A_MONTH
    usd = Distribution(p10=days.p10 * a_day, p50=days.p50 * a_day, p90=days.p90 * a_day)
    return CostPart(name=name, usd=usd, basis=f"{what}, at {price.basis}")


def _transfer(recipe: Recipe) -> Iterator[CostPart]:
    origin, here, size_gb = recipe.data.region, recipe.env.region, recipe.data.size_gb
    if origin is None or origin == here:
        return
    price = catalog.transfer_price(origin, here)
    if price.usd is None:
        yield CostPart(name="transfer", usd=None, basis=price.basis)
    elif size_gb is None:
        basis = f"unknown: the recipe does not say data.size_gb; {price.basis}"
        yield CostPart(name="transfer", usd=None, basis=basis)
    else:
        usd = size_gb * GB / BILLED_GB * price.usd
        basis = f"the shards once from {origin} to {here}, at {price.basis}"
        yield CostPart(name="transfer", usd=Distribution(p10=usd, p50=usd, p90=usd), basis=basis)
