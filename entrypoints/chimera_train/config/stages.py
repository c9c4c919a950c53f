"""Which layers a pipeline stage holds: one definition for the planner and for the trainer."""

from __future__ import annotations

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
    """Cut the model so that the slowest stage is as fast as it can be; every stage has a layer at least.

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
    layer = layer_parameters(model, experts=model.experts_per_token if model.num_experts else None)
    head = embedding_parameters(model)
    # All layers cost the same, so only the last stage, with the head, may want fewer than its even share.
    best: tuple[float, list[int]] | None = None
    for last in range(1, model.num_layers - num_stages + 2):
        others = num_stages - 1
        rest = model.num_layers - last
        if (others == 0) != (rest == 0):
            continue
        counts = [rest // others + (i < rest % others) for i in range(others)] if others else []
        slowest = max([count * layer for count in counts] + [last * layer + head])
        # Later candidates have a longer last stage, which on a tie balances memory better than a shorter one.
        if best is None or slowest <= best[0]:
            best = (slowest, [*counts, last])
    assert best is not None
    found, start = [], 0
    for number, count in enumerate(best[1]):
        found.append(Stage(number, range(start, start + count), first=number == 0, last=number == num_stages - 1))
        start += count
    return found
