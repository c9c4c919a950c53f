"""AdamW, the learning rate as a function of the step, and gradient clipping over sharded parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import OptimConfig
from .model.local import local


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, which counts from 1 to `num_steps`.

    Linear warm-up reaches optim.learning_rate at step warmup_steps. Then cosine: half a cosine down to the floor at the
    last step; wsd (warm-up, stable, decay): constant, then linear down to the floor over the last decay_steps;
    constant: constant. The floor is learning_rate × min_learning_rate_ratio.
    """
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.learning_rate
    if optim.schedule == "cosine":
        progress = (step - optim.warmup_steps) / (num_steps - optim.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay_steps = wsd_decay_steps(optim, num_steps)
        share = min(1.0, (num_steps - step) / decay_steps)
    floor = optim.min_learning_rate_ratio
    return optim.learning_rate * (floor + (1 - floor) * share)


def wsd_decay_steps(optim: OptimConfig, num_steps: int) -> int:
    """Length of the final decay: as set, or a tenth of the run, but never into the warm-up."""
    if optim.decay_steps is not None:
        return max(1, optim.decay_steps)
    return max(1, min(num_steps // 10, num_steps - optim.warmup_steps))


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Two groups: matrices (embedding and router among them) with weight decay, norms without."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


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
                grad.device_mesh.size(axis) for axis, placement in enumerate(grad.placements) if placement.is_shard()
            )
            by_replicas[ranks // shards].append(grad.to_local())
        elif grad is not None:
            by_replicas[ranks].append(grad)
    addends = [
        torch.stack(torch._foreach_norm(grads)).double().square().sum() / replicas
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
