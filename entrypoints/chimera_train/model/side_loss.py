"""A loss that is minimised but not reported, put into the gradient where it arises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SideLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)


def add_side_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x` unchanged; in backward, the gradient of the scalar `loss` is added to that of whatever made it.

    It need not be carried to the end of the model, through pipeline stages on other ranks. Backward must start from a
    sum over tokens with gradient one, as it does here.
    """
    return _SideLoss.apply(x, loss)
