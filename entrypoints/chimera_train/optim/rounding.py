"""Rounding to bfloat16 up or down at random, so that updates smaller than half a step of it count on average.

The random bits are a hash of the seed, the parameter's name, the step and the element's place in the whole parameter.
There is no generator: a resumed run, and a run on another mesh, rounds as the uninterrupted one does.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x7FEB352D
"""Below 2^31: its product with 32 bits fits an int64."""


def key_of(*parts: object) -> int:
    """32 bits that stand for `parts`."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:4], "big")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (as int64) in which every input bit changes half of the output bits: two rounds of
    xor-shift and multiply, the form of MurmurHash3's finaliser."""
    x = ((x ^ (x >> 16)) * _MULTIPLIER) & _WORD
    x = ((x ^ (x >> 15)) * _MULTIPLIER) & _WORD
    return x ^ (x >> 16)


def random_bits(key: int, shape: tuple[int, int], first: tuple[int, int], device: torch.device) -> Tensor:
    """Int64 [rows, columns], uniform over [0, 2^16). `first` is the place of the first element in the whole matrix."""
    rows, columns = (
        torch.arange(start, start + count, device=device) for start, count in zip(first, shape, strict=True)
    )
    of_row = _mix(_mix(rows & _WORD) ^ key)
    return _mix(of_row[:, None] ^ _mix(columns + _MULTIPLIER)[None, :]) >> 16


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Float32 to bfloat16: a neighbour with the probability of its nearness. `bits` as `random_bits` gives them.

    bfloat16 is the upper half of a float32, so adding a random lower half carries with just that probability.
    """
    words = (x.view(torch.int32) + bits.to(torch.int32)) & ~0xFFFF
    # What is infinite or not a number stays so, whatever its lower half is.
    return torch.where(x.isfinite(), words.view(torch.float32), x).to(torch.bfloat16)
