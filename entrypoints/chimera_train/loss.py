"""Next-token cross-entropy, summed over valid tokens, whose logits never stand whole in memory.

The loss is a sum, not a mean. The training loop divides gradients once by the number of valid tokens of the whole
global batch, so micro-batches, ranks and documents of unequal length weigh by their tokens, and any split of the
batch gives the same step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather

IGNORE_INDEX = -100
"""A label that is no target."""


class LossSum(NamedTuple):
    """Cross-entropies of one micro-batch in nats, summed over its valid tokens; float32."""

    total: Tensor
    """Scalar; what backward starts from."""
    rows_B: Tensor
    """Of each sequence; detached."""


def chunked_cross_entropy(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    z_loss: float = 0.0,
) -> LossSum:
    """Cross-entropy of softmax(hidden @ weight.T) against labels, which are IGNORE_INDEX for no target.

    With `group`, its ranks have equal numbers of the weight's rows, in rank order, and the same hidden states, labels
    and loss. The gradient of the hidden states is an addend on each.

    The gradient is also of `z_loss` × the squared log-normaliser of each valid token (arXiv 2204.02311, §5); the loss
    is not.

    Gradients are computed chunk by chunk in the forward pass, while a chunk's logits exist; nothing is recomputed in
    the backward pass, and the weight is not read there. `chunk_tokens` 0 is one chunk.
    """
    tokens = labels_BS.numel()
    total, losses = _ChunkedCrossEntropy.apply(
        hidden_BSD.reshape(tokens, -1),
        weight_VD,
        labels_BS.reshape(tokens),
        chunk_tokens or tokens,
        group,
        z_loss,
        torch.is_grad_enabled(),
    )
    return LossSum(total, losses.view_as(labels_BS).sum(dim=1))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        z_loss: float,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        first_row = 0 if group is None else group.rank() * len(weight)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        if with_grad:
            grad_hidden = torch.empty_like(hidden)
            # float32 even where the weight is bfloat16: the sum over chunks would lose the small ones.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            valid = labels[chunk] != IGNORE_INDEX
            target = labels[chunk] - first_row
            found = valid if group is None else valid & (target >= 0) & (target < len(weight))
            target = target.where(found, 0)
            rows = torch.arange(len(target), device=target.device)
            logits = (hidden[chunk] @ weight.T).float()
            log_normalizer = logits.logsumexp(dim=-1)
            target_logit = logits[rows, target]
            if group is not None:
                log_normalizer, target_logit = _over_vocabulary(log_normalizer, target_logit.where(found, 0.0), group)
            losses[chunk] = (log_normalizer - target_logit).where(valid, 0.0)
            if with_grad:
                grad = logits.sub_(log_normalizer[:, None]).exp_()  # softmax, in the memory of the logits
                if z_loss:
                    grad.mul_((1 + 2 * z_loss * log_normalizer)[:, None])
                grad[rows, target] -= found.float()
                grad = grad.mul_(valid[:, None]).to(hidden.dtype)
                grad_hidden[chunk] = grad @ weight
                grad_weight += grad.T @ hidden[chunk]
        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx, upstream: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():  # another backward will want them as they are
            return grad_hidden * upstream, grad_weight * upstream, *(None,) * 5
        # In place, because the weight's gradient is the largest tensor of the step.
        return grad_hidden.mul_(upstream), grad_weight.mul_(upstream), *(None,) * 5


def _over_vocabulary(log_normalizer: Tensor, target_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Both of the whole vocabulary, from those of every rank's rows, in one collective."""
    mine = torch.stack((log_normalizer, target_logit))
    of_ranks = all_gather(mine, 0, group.size(), group.group_name).unflatten(0, (-1, 2))
    return of_ranks[:, 0].logsumexp(dim=0), of_ranks[:, 1].sum(dim=0)


def whole_vocabulary(logits_BSV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Logits of the whole vocabulary, from those of every rank's rows. For evaluation: gradients do not pass."""
    return all_gather(logits_BSV.detach(), 2, group.size(), group.group_name)
