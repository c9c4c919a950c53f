"""Number formats: the recipe's `precision` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Mixed precision: master weights and optimizer states are always float32."""

    name: str
    param_dtype: Dtype = "bfloat16"
    """What forward and backward compute in."""
    reduce_dtype: Dtype = "float32"
    """What gradients are reduced in."""

    def validate(self) -> list[Problem]:
        return []
