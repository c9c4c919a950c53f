"""What backward is to do on its way: a loss that is minimised but not reported, and a count."""

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


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        ctx.total.add_(counts)
        return grad, None, None


def count_in_backward(x: Tensor, counts: Tensor, total: Tensor) -> Tensor:
    """`x` unchanged; in backward, `counts` are added to `total` in place.

    In backward, because that passes here once whatever of the forward is computed again, and never when nothing is
    trained.
    """
    return _CountInBackward.apply(x, counts, total)
