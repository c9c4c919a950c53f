"""Where runs run. Each target renders, submits, reports and stops; `base` says what that means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Target


def get(name: str) -> Target:
    """The target called `name` in a recipe. Imports that one only."""
    if name == "local":
        from .local import LocalTarget

        return LocalTarget()
    if name == "sagemaker":
        from .sagemaker import SageMakerTarget

        return SageMakerTarget()
    raise AssertionError(f"the schema knows no target {name!r}")
