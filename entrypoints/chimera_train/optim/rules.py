"""Update rules that treat every element alike, on float32 tensors in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = dict[str, Any]
"""An entry of param_groups: lr, weight_decay, betas, eps."""


@dataclass(frozen=True)
class Rule:
    states: tuple[str, ...]
    """Names of what it keeps of a parameter."""
    update: Callable[[Tensor, Tensor, dict[str, Tensor], int, Group], None]
    """(parameter, gradient, states by name, step from 1, group): changes parameter and states in place."""


def _adamw(parameter: Tensor, grad: Tensor, states: dict[str, Tensor], step: int, group: Group) -> None:
    """arXiv 1711.05101, algorithm 2; the decay is scaled by the learning rate, as in torch."""
    mean, square, (beta1, beta2) = states["exp_avg"], states["exp_avg_sq"], group["betas"]
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))


def _lion(parameter: Tensor, grad: Tensor, states: dict[str, Tensor], step: int, group: Group) -> None:
    """arXiv 2302.06675, algorithm 2."""
    mean, (beta1, beta2) = states["exp_avg"], group["betas"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(mean.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
    mean.lerp_(grad, 1 - beta2)


ADAMW = Rule(("exp_avg", "exp_avg_sq"), _adamw)
LION = Rule(("exp_avg",), _lion)
