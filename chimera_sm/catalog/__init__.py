"""What AWS offers: instance types, prices, spot history, storage, regions and training images, as data files with their
sources.

Look-ups are typed, need no network and read only the file they need. What no source says is None, never a guess.
"""

from __future__ import annotations

from .errors import NoImage, UnknownInstance, UnknownName, UnknownRegion, UnknownTier
from .images import training_image
from .instances import Instance, instance, instance_types
from .prices import Price, SpotHistory, offered, price, spot_bucket, spot_history
from .rates import SOLD, Rate, RateKind, Service, premium, rate
from .regions import Region, region, regions
from .storage import UnitPrice, fsx_price, fsx_tiers, s3_price, transfer_price
from .tables import DATA, catalog_version

__all__ = [
    "CATALOG_VERSION",
    "DATA",
    "SOLD",
    "Instance",
    "NoImage",
    "Price",
    "Rate",
    "RateKind",
    "Region",
    "Service",
    "SpotHistory",
    "UnitPrice",
    "UnknownInstance",
    "UnknownName",
    "UnknownRegion",
    "UnknownTier",
    "catalog_version",
    "fsx_price",
    "fsx_tiers",
    "instance",
    "instance_types",
    "offered",
    "premium",
    "price",
    "rate",
    "region",
    "regions",
    "s3_price",
    "spot_bucket",
    "spot_history",
    "training_image",
    "transfer_price",
]

CATALOG_VERSION: str


def __getattr__(name: str) -> str:
    if name == "CATALOG_VERSION":
        return catalog_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
