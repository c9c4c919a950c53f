"""Number formats: the recipe's `precision` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What is computed, reduced and kept in which format."""

    name: str
    param_dtype: Dtype = "bfloat16"
    """What forward and backward compute in."""
    reduce_dtype: Dtype = "float32"
    """What gradients are reduced in."""
    master_weights: bool = True
    """Keep parameters and gradients in float32. False: they are kept in param_dtype=bfloat16, in half the memory.
    Updates are computed in float32 and rounded to bfloat16 stochastically, so that small ones count on average; the
    same run rounds alike on every mesh and after a resume. Shards of gradients are summed over micro-batches in
    bfloat16, unless parallel.defer_gradient_sync keeps them whole, in reduce_dtype."""

    def validate(self) -> list[Problem]:
        problems = []
        if not self.master_weights and self.param_dtype == "float32":
            problems.append(
                Problem(
                    "precision.master_weights",
                    "false, but precision.param_dtype=float32 already is what master weights are kept in",
                    "set precision.param_dtype=bfloat16, or precision.master_weights=true",
                )
            )
        return problems
