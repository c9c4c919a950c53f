"""Activation checkpointing: which tensors of a block's forward are kept, and which are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..config.train import ActivationCheckpointing
from ..model import flash
from . import ring

aten = torch.ops.aten

ATTENTION_OPS = (
    # The most expensive to repeat, and a small output: always kept.
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    flash.OPERATOR,
    ring.OPERATOR,
    # Not expensive, but a token that chose other experts in the repetition would get another token's gradient.
    aten.topk.default,
)
COMMUNICATION_OPS = (
    # Slow, and a repetition would wait for the other ranks again. All-gathers are repeated: what they give is the whole
    # sequence, as many times a rank's part as there are ranks.
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
MATMUL_OPS = (
    # Every second one is kept: half the memory of the projections for half of their repetition.
    aten.mm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
)


def _selective_context() -> tuple[Any, Any]:
    """Contexts of one forward and its repetition; both must see the same count of matmuls."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPS or op in COMMUNICATION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op in MATMUL_OPS:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(block: nn.Module, mode: ActivationCheckpointing) -> None:
    """Wrap the block's forward, not the block: names of parameters stay, and FSDP's hooks stay outside.

    full: keep the block's input only. selective: also attention's output, what came from other ranks, and every second
    matmul's output.
    """
    if mode == "none":
        return
    options: dict[str, Callable] = {"context_fn": _selective_context} if mode == "selective" else {}
    # Nothing in a block draws random numbers, so there is no state to keep for the repetition.
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)
