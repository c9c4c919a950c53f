"""Number formats: the recipe's `precision` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

Dtype = Literal["float32", "bfloat16"]
Float8 = Literal["none", "tensorwise", "rowwise", "mxfp8"]

FLOAT8_MULTIPLE = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}
"""Sizes of a product must be multiples of it: of 16 bytes for the kernels, of a block for mxfp8."""

FLOAT8_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
"""Least CUDA compute capability: Ada, Hopper, Blackwell."""

FLOAT8_REQUIREMENT = "torchao>=0.18"
"""What float8 takes beside torch, as pip reads it."""


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

    float8: Float8 = "none"
    """Products of blocks' projections in 8-bit floating point: with one scale a tensor (fastest), one a row (closer),
    or mxfp8's one for 32 elements (Blackwell). Only projections whose sizes are multiples of 16 (mxfp8: 32); never
    the head, routers and experts. Faster than bfloat16 only with train.compile, which fuses the casts."""
    float8_filter: tuple[str, ...] = ()
    """Only projections whose name contains one of these, such as feed_forward or layers.3.; empty: all."""
    float8_all_gather: bool = False
    """Cast these projections' weights before FSDP gathers them, and gather 1 byte an element instead of 2; what is
    computed stays the same, bit for bit. Costs one more small all-reduce a step, of the weights' largest elements.
    float8=tensorwise only: with a scale a row, backward would need other casts than forward."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.float8 != "none" and self.param_dtype != "bfloat16":
            message = f"{self.float8} casts from bfloat16, and precision.param_dtype is {self.param_dtype}"
            problems.append(Problem("precision.float8", message, "set precision.param_dtype=bfloat16"))
        if self.float8_filter and self.float8 == "none":
            message = "would be ignored by precision.float8=none"
            fix = "set precision.float8=rowwise or tensorwise, or precision.float8_filter=[]"
            problems.append(Problem("precision.float8_filter", message, fix, no_effect=True))
        if self.float8_all_gather and self.float8 != "tensorwise":
            message = f"true, but only float8=tensorwise has weights with one scale, and precision.float8={self.float8}"
            fix = "set precision=fp8, or precision.float8_all_gather=false"
            problems.append(Problem("precision.float8_all_gather", message, fix, no_effect=True))
        if not self.master_weights and self.param_dtype == "float32":
            problems.append(
                Problem(
                    "precision.master_weights",
                    "false, but precision.param_dtype=float32 already is what master weights are kept in",
                    "set precision.param_dtype=bfloat16, or precision.master_weights=true",
                )
            )
        return problems


def gather_problems(precision: PrecisionConfig, shard: int) -> list[Problem]:
    """shard: ranks that dense parameters are sharded over (`MeshLayout.shard`)."""
    if not precision.float8_all_gather or shard > 1:
        return []
    message = (
        "true, but would be ignored: parallel.fully_sharded × parallel.context_parallel = 1, so every rank has its "
        "weights whole and gathers none"
    )
    fix = "set precision.float8_all_gather=false, or shard over more ranks"
    return [Problem("precision.float8_all_gather", message, fix)]
