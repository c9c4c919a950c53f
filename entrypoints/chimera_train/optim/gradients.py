"""Gradients of parameters that many ranks hold parts of: completed, measured, scaled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model.local import local


def local_grad_norm_squared(parameters: Iterable[nn.Parameter], ranks: int) -> Tensor:
    """This rank's addend of the squared global L2 norm of the gradients, float64 scalar on their device.

    The sum over all ranks is the squared norm: a shard that several of the `ranks` of a pipeline stage hold counts as
    many times less.
    """
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            shards = math.prod(
                grad.device_mesh.size(axis)
                for axis, placement in enumerate(grad.placements)
                if not placement.is_replicate()  # torch's is_shard leaves out the shards of what is split twice
            )
            by_replicas[ranks // shards].append(grad.to_local())
        elif grad is not None:
            by_replicas[ranks].append(grad)
    addends = [
        torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).double().square().sum() / replicas
        for replicas, grads in by_replicas.items()
    ]
    return torch.stack(addends).sum()


def sum_over_tensor(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Complete the gradients of parameters that the tensor axis does not split, in one all-reduce.

    Each rank of that axis computes with a part of the sequence, or of the heads behind the parameter, so what it has is
    an addend. Reduced once a step rather than in every backward.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None and not _holds_own_part(p)]
    if grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def _holds_own_part(parameter: nn.Parameter) -> bool:
    """Whether the tensor axis splits the parameter: by itself, or as one of the axes that experts are sharded over."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return bool({"tensor", "expert", "expert_shard"}.intersection(names or ()))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)


def clip_factor(grad_norm: float, max_grad_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_grad_norm` (0: not clipped)."""
    if max_grad_norm == 0:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))
