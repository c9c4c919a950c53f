"""Tensors of sharded models, for comparison."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it. Collective where it is sharded; one rank may have its parameters as plain tensors."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
