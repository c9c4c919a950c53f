"""The learning rate as a function of the step."""

from __future__ import annotations

import math

import torch

from ..config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, which counts from 1 to `num_steps`.

    Linear warm-up reaches optim.learning_rate at step warmup_steps. Then, with the floor learning_rate ×
    min_learning_rate_ratio: cosine: half a cosine down to the floor at the last step; linear: a line to the same
    point; wsd (warm-up, stable, decay; arXiv 2404.06395): constant, then linear down to the floor over the last
    decay_steps; inverse_sqrt: learning_rate × sqrt(warmup_steps / step) (arXiv 1706.03762, §5.3), at least the
    floor; constant: constant.
    """
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.learning_rate
    floor = optim.min_learning_rate_ratio
    if optim.schedule == "inverse_sqrt":
        return optim.learning_rate * max(floor, math.sqrt(max(1, optim.warmup_steps) / step))
    if optim.schedule == "wsd":
        share = min(1.0, (num_steps - step) / wsd_decay_steps(optim, num_steps))
    else:
        progress = (step - optim.warmup_steps) / (num_steps - optim.warmup_steps)
        share = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.learning_rate * (floor + (1 - floor) * share)


def wsd_decay_steps(optim: OptimConfig, num_steps: int) -> int:
    """Length of the final decay: as set, or a tenth of the run, but never into the warm-up."""
    if optim.decay_steps is not None:
        return max(1, optim.decay_steps)
    return max(1, min(num_steps // 10, num_steps - optim.warmup_steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
