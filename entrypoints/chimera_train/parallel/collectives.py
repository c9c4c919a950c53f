"""Collectives with gradients, at the borders of what ranks compute on parts of a sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import all_gather, reduce_scatter


def gather(x: Tensor, dim: int, group: dist.ProcessGroup, by_copy: bool = False) -> Tensor:
    """The ranks' parts along `dim`, joined. Its gradient, an addend on every rank, is reduced and scattered."""
    return _Gather.apply(x, dim, group.size(), group.group_name, by_copy)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks. Its gradient is gathered."""
    return _Scatter.apply(x, dim, group.size(), group.group_name)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str, by_copy: bool) -> Tensor:
        ctx.where = dim, size, group
        return all_gather(x, dim, size, group, by_copy=by_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return reduce_scatter(grad, *ctx.where), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str) -> Tensor:
        ctx.where = dim, size, group
        return reduce_scatter(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grad, *ctx.where), None, None, None
