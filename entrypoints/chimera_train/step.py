"""The gradients of one optimizer step: forward and backward, one reduction, check, clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .clock import StepClock
from .config import OptimConfig, TrainRecipe
from .loss import IGNORE_INDEX
from .model import Decoder
from .model.sequence import to_device
from .optim import clip_factor, local_grad_norm_squared, scale_gradients, sum_over_tensor
from .parallel import Meshes, Pipeline, refresh_scales, set_gradient_sync


class NotFinite(RuntimeError):
    """Loss or gradient norm is not a number. The weights were not moved."""

    explains_itself = True


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a step, bit for bit the same."""

    loss: float
    """Cross-entropy in nats, mean over the valid tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    source_losses: list[float | None]
    """The same by source; None for one without a valid token in this batch."""
    stop: bool
    """Some rank was asked to stop."""
    profile: bool
    """Some rank was asked for a profile."""
    waits_s: list[float]
    """By rank: seconds that it waited for its data."""


def forward_backward(
    model: Decoder | Pipeline,
    recipe: TrainRecipe,
    micro_batches: list[np.ndarray],
    device: torch.device,
    *,
    source_ids: np.ndarray | None = None,
    num_sources: int = 1,
    clock: StepClock | None = None,
) -> Tensor:
    """Accumulate gradients of the loss summed over tokens; the host does not wait for the device.

    micro_batches: int64 [B, S + 1] each; inputs are [:, :-1] and labels [:, 1:]; -100 is a label that does not count.
    source_ids: int64 [micro-batches × B], the source of every row; None where there is one.
    Returns this rank's sum of cross-entropies and count of valid tokens by source, float64 [num_sources, 2] on the
    device.
    """
    clock = clock or StepClock(device)
    refresh_scales(model)
    if isinstance(model, Pipeline):
        inputs = model.sequence.feed(np.concatenate(micro_batches), device)
        with clock.phase("pipeline"):
            rows_B = model.forward_backward(inputs.tokens_BS, inputs.labels_BS, len(micro_batches))
        return sums_by_source(rows_B, inputs.labels_BS, source_ids, num_sources)
    sums = torch.zeros(num_sources, 2, dtype=torch.float64, device=device)
    for index, micro_batch in enumerate(micro_batches):
        inputs = model.sequence.feed(micro_batch, device)
        set_gradient_sync(model, recipe, last_micro_batch=index == len(micro_batches) - 1)
        with clock.phase("forward"):
            loss = model(inputs.tokens_BS, inputs.labels_BS, inputs.documents)
        with clock.phase("backward"):
            loss.total.backward()
        rows = len(micro_batch)
        sources_B = None if source_ids is None else source_ids[index * rows : (index + 1) * rows]
        sums += sums_by_source(loss.rows_B, inputs.labels_BS, sources_B, num_sources)
    return sums


def forward_only(model: Decoder | Pipeline, micro_batch: np.ndarray, device: torch.device) -> Tensor:
    """The sum of cross-entropies and the count of valid tokens of one micro-batch, without gradients; float64 [2].
    After `refresh_scales`."""
    inputs = model.sequence.feed(micro_batch, device)
    if isinstance(model, Pipeline):
        rows = model.forward_only(inputs.tokens_BS, inputs.labels_BS, num_micro_batches=1)
        return sums_by_source(rows, inputs.labels_BS)[0]
    with torch.no_grad():
        loss = model(inputs.tokens_BS, inputs.labels_BS, inputs.documents)
    return sums_by_source(loss.rows_B, inputs.labels_BS)[0]


def sums_by_source(
    rows_B: Tensor, labels_BS: Tensor, sources_B: np.ndarray | None = None, num_sources: int = 1
) -> Tensor:
    """Cross-entropies `rows_B` and valid labels, summed by source: float64 [num_sources, 2]."""
    of_rows_B2 = torch.stack((rows_B.double(), (labels_BS != IGNORE_INDEX).sum(dim=1).double()), dim=1)
    if sources_B is None:
        return of_rows_B2.sum(dim=0, keepdim=True)
    sources = to_device(sources_B, rows_B.device)
    # A product and no scatter, which on a GPU adds in any order.
    members = sources == torch.arange(num_sources, device=rows_B.device)[:, None]
    return members.double() @ of_rows_B2


def finish_gradients(
    model: nn.Module,
    optim: OptimConfig,
    sums: Tensor,
    meshes: Meshes,
    *,
    step: int,
    stop: bool = False,
    profile: bool = False,
    wait_s: float = 0.0,
) -> StepResult:
    """Divide the gradients by the global count of valid tokens, and clip them. Collective.

    All that ranks must agree on travels in one all-reduce, and reading it is the one time in a step that the host waits
    for the device: loss and tokens by source, gradient norm, the wishes to stop and to profile, and each rank's wait
    for data. The finite check needs the host to wait: whatever optimizer comes after it must not have begun.
    `sums`: as `forward_backward` returns them.
    Raises NotFinite, on all ranks alike, before the optimizer has moved anything.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    of_host = torch.zeros(2 + world_size, dtype=torch.float64)
    of_host[0], of_host[1] = stop, profile
    of_host[2 + rank] = wait_s
    if meshes.layout.tensor > 1:
        sum_over_tensor(parameters, meshes.tensor.get_group())
    norm_squared = local_grad_norm_squared(parameters, world_size // meshes.layout.pipeline)
    by_source = sums.flatten() * meshes.reports_loss
    agreed = torch.cat((by_source, norm_squared[None], of_host.to(sums.device, non_blocking=True)))
    dist.all_reduce(agreed)
    values = agreed.tolist()
    losses, tokens = values[: sums.numel() : 2], values[1 : sums.numel() : 2]
    loss_sum, num_tokens = sum(losses), sum(tokens)
    norm_squared, stops, profiles, *waits_s = values[sums.numel() :]
    if num_tokens == 0:
        raise NotFinite(f"step {step}: no valid token in the whole global batch; look at the data")
    result = StepResult(
        loss=loss_sum / num_tokens,
        source_losses=[loss / count if count else None for loss, count in zip(losses, tokens, strict=True)],
        grad_norm=math.sqrt(norm_squared) / num_tokens,
        stop=stops > 0,
        profile=profiles > 0,
        waits_s=waits_s,
    )
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise NotFinite(f"step {step}: loss={result.loss} grad_norm={result.grad_norm}. The weights were not moved")
    scale_gradients(parameters, clip_factor(result.grad_norm, optim.max_grad_norm) / num_tokens)
    return result
