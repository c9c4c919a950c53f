"""AWS's deep learning containers for training with PyTorch."""

from __future__ import annotations

from typing import Literal

from .errors import NoImage
from .regions import region as known_region
from .tables import rows


def training_image(region: str, framework_version: str, accelerator: Literal["gpu", "cpu", "trainium"] = "gpu") -> str:
    """URI of the default training image.

    >>> training_image("us-east-1", "2.13", "gpu")
    '763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker'

    Raises UnknownRegion, or NoImage where AWS publishes none for the version, the accelerator or the partition.
    """
    place = known_region(region)
    if accelerator == "trainium":
        raise NoImage(
            f"no default image of PyTorch {framework_version} for Trainium: AWS's end at 2.9",
            fix="name one with target.image",
        )
    versions = list(dict.fromkeys(row["framework_version"] for row in rows("images")))
    for row in rows("images"):
        if row["framework_version"] == framework_version and row["device"] == accelerator:
            if place.partition not in row["partitions"].split():
                raise NoImage(
                    f"PyTorch {framework_version} is not published in {region} ({place.partition})",
                    fix="choose an older target.framework_version, or name an image with target.image",
                )
            registry = f"{place.image_account}.dkr.ecr.{region}.{place.dns_suffix}"
            return f"{registry}/{row['repository']}:{row['tag']}"
    raise NoImage(
        f"no default image for target.framework_version={framework_version!r}",
        fix=f"use one of {', '.join(versions)}, or name an image with target.image",
    )
