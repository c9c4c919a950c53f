"""Gather and scatter as operations that return new tensors, so that torch.compile sees them in its graph.

These are the operations that torch lowers its own to, under names that hold from 2.11 to 2.14; torch.distributed has
renamed its functions in between. `group` is the name of a process group, `size` its number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def all_gather(x: Tensor, dim: int, size: int, group: str, *, by_copy: bool = False) -> Tensor:
    """The ranks' tensors of equal shape, joined along `dim` (not negative) in rank order.

    `by_copy` joins by a copy where none is needed: the only form that inductor's pass for overlap knows along other
    dimensions than the first. It takes the copy out again.
    """
    if _leads(x, dim) and not (by_copy and dim):
        return _gathered(x.flatten(0, dim), size, group).unflatten(0, (*x.shape[:dim], -1))
    return torch.cat(_gathered(x, size, group).chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """This rank's part along `dim` (not negative), of `size` equal ones in rank order, of the sum over ranks."""
    if _leads(x, dim):
        part = _scattered(x.flatten(0, dim), size, group)
        # The one view that autograd does not take for one: FSDP warns of a module that returns a view.
        return torch.ops.aten._unsafe_view(part, (*x.shape[:dim], *part.shape))
    return _scattered(torch.cat(x.chunk(size, dim)), size, group)


def _leads(x: Tensor, dim: int) -> bool:
    """The ranks' parts along `dim` stand one after another in memory, so that they need no copy."""
    return math.prod(x.shape[:dim]) == 1


def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group))


def _scattered(x: Tensor, size: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
