"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer states over the shard axis, replicas over
data_parallel. Parameters keep their names; they become DTensors.

Experts are a group of their own where the ranks that hold different tokens of them are others than those that dense
parameters are sharded over: with expert parallel, or with tensor parallel, whose ranks split the tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from ..config import TrainRecipe
from ..model import Decoder
from ..model.moe import MixtureOfExperts
from .meshes import Meshes


def shard(model: Decoder, recipe: TrainRecipe, meshes: Meshes) -> None:
    """Every block, the embedding and the head are a group each, gathered and freed on its own.

    A single rank that computes in float32 is left as it is: nothing to split and nothing to cast, so that each gather
    would be a copy (3 to 6 % of a small model's step on a CPU).
    """
    if meshes.layout.world_size == 1 and recipe.precision.param_dtype == "float32":
        return
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision.param_dtype),
        reduce_dtype=getattr(torch, recipe.precision.reduce_dtype),
        # Blocks already get activations in param_dtype; the tables of rotary positions must stay float32.
        cast_forward_inputs=False,
    )
    mesh, blocks = meshes.fsdp, list(model.layers.values())
    frees = recipe.parallel.frees_after_forward
    groups: list[list[FSDPModule]] = []
    for block in blocks:
        # Backward begins with the last block, so freeing it in between would only gather it twice.
        reshard = frees and block is not blocks[-1]
        experts = []
        if meshes.layout.experts_apart and isinstance(block.feed_forward, MixtureOfExperts):
            experts = [block.feed_forward.experts]
            fully_shard(experts[0], mesh=meshes.expert_fsdp, mp_policy=policy, reshard_after_forward=reshard)
            _hide_from_selective_checkpointing(experts[0])
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        groups.append([block, *experts])
    if meshes.layout.expert > 1:
        _prefetch_ahead(groups)
    # A tied embedding is used at both ends of the model, so it belongs to the root, which stays whole in between.
    tied = model.stage.last and model.head is None
    for module in (model.embedding, model.head):
        if module is not None and not tied:
            # Neither is read in backward: an embedding's gradient needs indices only, and the loss computes the head's
            # gradients in forward. So they are freed after forward and not gathered again; a pipeline that keeps its
            # parameters over micro-batches keeps these too.
            kept = meshes.layout.pipeline > 1 and not frees
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
            module.set_unshard_in_backward(kept)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are of a sum over tokens, divided once by the global count. Sum, because gloo knows no
            # premultiplied sum, which a divide factor would otherwise select.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(part: Decoder) -> None:
    """Back to shards, after a forward pass that no backward pass follows: that would have done it."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _hide_from_selective_checkpointing(inside_block: nn.Module) -> None:
    """It counts a block's operations, which must be the same when they are repeated. Those by which FSDP gathers what
    is inside of the block are not: they depend on what is gathered already."""
    for hooks in (inside_block._forward_pre_hooks, inside_block._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = functools.partial(_without_modes, hook)


def _without_modes(hook: Callable[..., Any], *arguments: Any) -> Any:
    with _disable_current_modes():
        return hook(*arguments)


def _prefetch_ahead(groups: list[list[FSDPModule]]) -> None:
    """By name, because the host waits for the device in every block: what it queues comes too late to be ahead."""
    for before, after in itertools.pairwise(groups):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def set_gradient_sync(model: Decoder, recipe: TrainRecipe, *, last_micro_batch: bool) -> None:
    """Before the forward of a micro-batch: what its backward communicates.

    Replicas are reduced once a step, in the last micro-batch. Within a sharded group gradients are scattered in every
    micro-batch, so that a rank keeps a shard of them; with parallel.defer_gradient_sync they stay whole until the last.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last_micro_batch or not recipe.parallel.defer_gradient_sync)
    model.set_requires_all_reduce(last_micro_batch)  # after the other, which sets both
