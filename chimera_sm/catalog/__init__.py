"""What AWS offers: instance types, prices, spot history, regions and training images, as data files with their sources.

Look-ups are typed, need no network and read only the file they need. What no source says is None, never a guess.
"""

from __future__ import annotations

from .errors import NoImage, UnknownInstance, UnknownName, UnknownRegion
from .images import training_image
from .instances import Instance, instance, instance_types
from .prices import Price, SpotHistory, offered, price, spot_bucket, spot_history
from .regions import Region, region, regions
from .tables import DATA, catalog_version

__all__ = [
    "CATALOG_VERSION",
    "DATA",
    "Instance",
    "NoImage",
    "Price",
    "Region",
    "SpotHistory",
    "UnknownInstance",
    "UnknownName",
    "UnknownRegion",
    "catalog_version",
    "instance",
    "instance_types",
    "offered",
    "price",
    "region",
    "regions",
    "spot_bucket",
    "spot_history",
    "training_image",
]

CATALOG_VERSION: str


def __getattr__(name: str) -> str:
    if name == "CATALOG_VERSION":
        return catalog_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
