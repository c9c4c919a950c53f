"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer states over the shard axis, replicas over
data_parallel. Parameters keep their names; they become DTensors."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..config import TrainRecipe
from ..model import Decoder
from .meshes import Meshes


def shard(model: Decoder, recipe: TrainRecipe, meshes: Meshes) -> None:
    """Every block, the embedding and the head are a group each, gathered and freed on its own."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision.param_dtype),
        reduce_dtype=getattr(torch, recipe.precision.reduce_dtype),
        # Blocks already get activations in param_dtype; the tables of rotary positions must stay float32.
        cast_forward_inputs=False,
    )
    mesh, blocks = meshes.fsdp, list(model.layers.values())
    for block in blocks:
        # Backward begins with the last block, so freeing it in between would only gather it twice.
        reshard = recipe.parallel.reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # A tied embedding is used at both ends of the model, so it belongs to the root, which stays whole in between.
    tied = model.stage.last and model.head is None
    for module in (model.embedding, model.head):
        if module is not None and not tied:
            # Neither is read in backward: an embedding's gradient needs indices only, and the loss computes the head's
            # gradients in forward. So they are freed after forward and not gathered again.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            module.set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are of a sum over tokens, divided once by the global count. Sum, because gloo knows no
            # premultiplied sum, which a divide factor would otherwise select.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: Decoder, recipe: TrainRecipe, *, last_micro_batch: bool) -> None:
    """Before the forward of a micro-batch: what its backward communicates.

    Replicas are reduced once a step, in the last micro-batch. Within a sharded group gradients are scattered in every
    micro-batch, so that a rank keeps a shard of them; with parallel.defer_gradient_sync they stay whole until the last.
    """
    model.set_requires_gradient_sync(last_micro_batch or not recipe.parallel.defer_gradient_sync)
    model.set_requires_all_reduce(last_micro_batch)  # after the other, which sets both
