"""Initial weights that depend on the seed and on a parameter's name alone, never on the layout or the world size.

A parameter is drawn in blocks of whole rows, each from a generator of its own, on the CPU. A rank draws just the blocks
that its shard touches, so a model too large for one host is initialised as quickly as it is small a rank.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from ..config import ModelConfig
from .decoder import Decoder
from .parts import ModelParts
from .shards import shards

BLOCK_ELEMENTS = 1 << 20


def initialize(model: Decoder | ModelParts, seed: int) -> None:
    """Fill every parameter and buffer in place (plain or DTensor, on any device but meta).

    Norms are one and biases zero; matrices are normal with model.initializer_range, divided by sqrt(2 × num_layers)
    for the two projections that write to the residual stream (GPT-2's rule).
    """
    for shard in shards(model):
        if len(shard.shape) == 1:
            shard.local.fill_(0.0 if shard.name.endswith("bias") else 1.0)
            continue
        std = _std(shard.name, model.config)
        rows = _draw_rows(shard.name, shard.shape, std, seed, shard.offset[0], shard.local.shape[0])
        for dim in range(1, rows.ndim):
            rows = rows.narrow(dim, shard.offset[dim], shard.local.shape[dim])
        shard.local.copy_(rows)


def _std(name: str, config: ModelConfig) -> float:
    writes_residual = "o_proj" in name or "down_proj" in name
    return config.initializer_range / (math.sqrt(2 * config.num_layers) if writes_residual else 1.0)


def _draw_rows(name: str, shape: tuple[int, ...], std: float, seed: int, start: int, count: int) -> Tensor:
    """Rows [start, start + count) of the parameter's full tensor, float32, on the CPU."""
    block_rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    out = torch.empty(count, *shape[1:], device="cpu")
    for block in range(start // block_rows, (start + count - 1) // block_rows + 1):
        first = block * block_rows
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows = torch.empty(min(block_rows, shape[0] - first), *shape[1:], device="cpu")
        rows.normal_(0.0, std, generator=generator)
        low, high = max(first, start), min(first + len(rows), start + count)
        out[low - start : high - start] = rows[low - first : high - first]
    return out
