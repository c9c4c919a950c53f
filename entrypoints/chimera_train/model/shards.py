"""This rank's parts of a model, however it is sharded: what fills a model walks over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Shard:
    """A box out of a parameter, or out of a buffer that belongs to the model."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box starts in it."""
    local: Tensor
    """The box itself, which shares memory with the model."""


def shards(model: nn.Module) -> Iterator[Shard]:
    """Every parameter and persistent buffer of which this rank holds anything, in the model's order."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local, offset = own_box(tensor)
        if local.numel():
            yield Shard(name, tuple(tensor.shape), offset, local)


def own_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, whole or sharded, and where that starts in the whole of it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)
