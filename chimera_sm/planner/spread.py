"""How several causes of error make one band."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from .types import Distribution

Percentile = Literal["p10", "", "p90"]
"""`""` is the median."""
Z90 = 1.2816
"""Standard normal at the 90th percentile."""
MAX_INFLATION = 20.0
"""Running time over useful time beyond which a run is called one that would not finish: the formula goes on to say
"in so many million days", and nobody waits for that."""


def band(middle: float, ends: Iterable[tuple[float, float]]) -> Distribution:
    """The 80% band of a quantity that independent causes move up and down.

    `ends` has, for each cause alone at its 10th and its 90th percentile, the quantity with all others at their medians.
    The logarithms of the shifts add in squares, on each side for itself: exact for a product of independent lognormal
    factors, and close where the factors are nearly so. To take all causes at their ends together instead would claim
    that whatever goes wrong goes wrong at once.
    """
    down = up = 0.0
    for low, high in ends:
        # Where a cause works the other way round, its 10th percentile is the high end.
        low, high = min(low, high), max(low, high)
        down += math.log(middle / min(low, middle)) ** 2
        up += math.log(max(high, middle) / middle) ** 2
    return Distribution(p10=middle * math.exp(-math.sqrt(down)), p50=middle, p90=middle * math.exp(math.sqrt(up)))
