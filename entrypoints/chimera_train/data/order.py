"""The order of the samples: a keyed permutation of [0, n) that is computed, never stored.

A Feistel network over pairs (left, right) with left < a, right < b and a · b ≥ n, whose round functions are added
modulo a or b (the generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). Values that fall into [n, a · b) are sent through again until they leave it ("cycle walking"); since
a · b - n < a, that is rare. The round function is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
Time is O(1) a sample and memory O(1) in all, so that a run resumes at any sample at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of splitmix64 for each uint64 state; wraps modulo 2^64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers, order included, e.g. (seed, epoch)."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state ^ np.uint64(part & _MASK))
    return int(state[0])


class Permutation:
    """A bijection of [0, n) that depends on `n` and `seed` alone. Calling it maps int64 arrays of any shape."""

    def __init__(self, n: int, seed: int):
        if not 1 <= n < 1 << 62:
            raise ValueError(f"a permutation of {n} elements; n must be in [1, 2^62)")
        self.n = n
        self._a = math.isqrt(n - 1) + 1  # ceil(sqrt(n))
        self._b = -(-n // self._a)
        self._keys = [np.uint64(derive_seed(seed, round_)) for round_ in range(NUM_ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Images of `positions` (each in [0, n)), as int64 of the same shape."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.n):
            raise ValueError(f"positions outside [0, {self.n})")
        values = self._encrypt(positions.ravel().astype(np.uint64))
        while True:
            outside = np.flatnonzero(values >= self.n)
            if not outside.size:
                return values.astype(np.int64).reshape(positions.shape)
            values[outside] = self._encrypt(values[outside])

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = values // b, values % b
        for round_, key in enumerate(self._keys):
            if round_ % 2:
                right = (right + splitmix64(left ^ key) % b) % b
            else:
                left = (left + splitmix64(right ^ key) % a) % a
        return left * b + right
