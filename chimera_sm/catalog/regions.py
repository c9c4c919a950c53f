"""Regions with SageMaker's deep learning containers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chimera_train.config import nearest

from .errors import UnknownRegion
from .tables import rows


@dataclass(frozen=True, kw_only=True)
class Region:
    name: str
    partition: str
    """`aws`, `aws-cn`, `aws-us-gov`, …: part of every ARN."""
    dns_suffix: str
    image_account: str
    """Account of the deep learning containers' registry."""


@functools.cache
def _table() -> dict[str, Region]:
    return {
        row["region"]: Region(
            name=row["region"],
            partition=row["partition"],
            dns_suffix=row["dns_suffix"],
            image_account=row["image_account"],
        )
        for row in rows("regions")
    }


def regions() -> tuple[str, ...]:
    """Names of all known regions."""
    return tuple(_table())


def region(name: str) -> Region:
    """The facts of one region. Raises UnknownRegion, which names the nearest known one."""
    try:
        return _table()[name]
    except KeyError:
        raise UnknownRegion(name, nearest(name, _table())) from None
