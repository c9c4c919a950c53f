"""Which layers a pipeline stage holds: one definition for the planner and for the trainer."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from .flops import embedding_parameters, layer_parameters
from .model import ModelConfig


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers, with what stands before the first and after the last."""

    number: int
    layers: range
    """Global numbers of its layers."""
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the final norm, the head and the loss."""


def whole(model: ModelConfig) -> Stage:
    """The model in one piece."""
    return Stage(0, range(model.num_layers), first=True, last=True)


def stages(model: ModelConfig, num_stages: int) -> list[Stage]:
    """Cut the model so that the slowest stage is as fast as it can be, and within that, stages are as even as they can
    be; every stage has a layer at least.

    A layer costs its active parameters, the output head costs its matrix, and the embedding, a look-up, nothing.
    Raises ValueError where there are more stages than layers.

    >>> tiny = ModelConfig(
    ...     name="t", vocab_size=64, hidden_size=8, intermediate_size=16, num_layers=7, num_heads=2, num_kv_heads=2
    ... )
    >>> [len(stage.layers) for stage in stages(tiny, 2)]
    [4, 3]
    """
    if not 1 <= num_stages <= model.num_layers:
        raise ValueError(f"{num_stages} stages for {model.num_layers} layers")
    costs = [layer_parameters(model, layer, active=True) for layer in range(model.num_layers)]
    costs[-1] += embedding_parameters(model)
    starts = _most_even_starts(costs, num_stages, _least_limit(costs, num_stages))
    ends = [*starts[1:], model.num_layers]
    return [
        Stage(number, range(start, end), first=number == 0, last=number == num_stages - 1)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _least_limit(costs: list[int], pieces: int) -> int:
    """The least cost that the dearest of `pieces` runs of consecutive costs can have."""

    def fits(limit: int) -> bool:
        needed, room = 1, limit
        for cost in costs:
            if cost > room:
                needed, room = needed + 1, limit
            room -= cost
        return needed <= pieces

    dearest = max(costs)
    return dearest + bisect.bisect_left(range(dearest, sum(costs)), True, key=fits)


def _most_even_starts(costs: list[int], pieces: int, limit: int) -> list[int]:
    """Where each piece starts, if none costs more than `limit` and the sum of the squares of their costs is the least.
    Of equal cuts, the one with the longer first pieces."""
    # best[end]: of the first `end` costs in as many pieces as were placed so far.
    best: list[tuple[float, list[int]]] = [(0, [])] + [(math.inf, [])] * len(costs)
    for _ in range(pieces):
        longer: list[tuple[float, list[int]]] = [(math.inf, [])]
        for end in range(1, len(costs) + 1):
            found, piece = (math.inf, [0]), 0
            for start in reversed(range(end)):
                piece += costs[start]
                if piece > limit:
                    break
                squares, starts = best[start]
                if squares + piece**2 < found[0]:
                    found = (squares + piece**2, [*starts, start])
            longer.append(found)
        best = longer
    return best[-1][1]
