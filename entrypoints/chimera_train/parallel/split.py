"""Parameters of which every rank of an axis computes with a part."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by a DTensor of which this rank has an even part along `dim`."""
    whole = getattr(module, name)
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    placed = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(placed))
