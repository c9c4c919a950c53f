"""Gather and scatter as operations that return new tensors, so that torch.compile sees them in its graph.

These are the operations that torch lowers its own to, under names that hold from 2.11 to 2.14; torch.distributed has
renamed its functions in between. `group` is the name of a process group, `size` its number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The ranks' tensors of equal shape, joined along `dim` in rank order."""
    parts = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group))
    return parts if dim == 0 else torch.cat(parts.chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """This rank's part along `dim`, of `size` equal ones in rank order, of the sum over ranks."""
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts, "sum", size, group))
