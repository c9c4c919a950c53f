"""Tensor parallel (Megatron-LM, arXiv 1909.08053) with sequence parallel (arXiv 2205.05198), always together.

Every rank of the tensor axis has some of the heads, some of the feed-forward's width and some of the vocabulary's rows.
Between these the hidden states are split along the sequence, so a norm or a residual addition is computed once. At the
border of attention or of the feed-forward they are gathered, and the ranks' partial sums are reduced and scattered.

Weights are DTensors on the tensor mesh and computation is on local tensors. What is not split (norms, routers, low-rank
projections) has a gradient that is an addend; `optim.sum_over_tensor` completes it once a step.

Shapes, by suffix: B sequences, S tokens a sequence, T = S / tensor of them, D hidden size.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import ConfigError, Problem
from ..model import Decoder
from ..model.decoder import Embedding
from ..model.feed_forward import FeedForward
from ..model.local import local
from .collectives import gather, scatter
from .meshes import Meshes
from .split import split_parameter

OUTPUT_SPLIT = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
"""Projections to heads or to the feed-forward's width: rows of the weight and the bias are split ("column parallel" in
Megatron-LM's terms)."""
INPUT_SPLIT = {"o_proj", "down_proj"}
"""Projections back to the hidden size: their outputs are addends ("row parallel")."""


def apply_tensor_parallel(model: Decoder, meshes: Meshes, *, overlapped: bool) -> None:
    """Split weights and put collectives at the borders, in place; nothing where the degree is 1. `overlapped`:
    parallel.async_tensor_parallel."""
    if meshes.layout.tensor == 1:
        return
    mesh = meshes.tensor
    for block in model.layers.values():
        _enter_whole(block.attention, mesh, dim=1, by_copy=overlapped)
        # A token's feed-forward needs no other token: in any order, so gathering along B spares a copy.
        if isinstance(block.feed_forward, FeedForward):
            _enter_whole(block.feed_forward, mesh, dim=0)
    if model.embedding is not None:
        split_parameter(model.embedding, "weight", mesh, dim=0)
        model.embedding.forward = partial(_look_up, model.embedding, mesh)
    if model.head is not None:
        split_parameter(model.head, "weight", mesh, dim=0)
    if model.norm is not None:
        model.norm.register_forward_hook(lambda norm, inputs, x_BTD: gather(x_BTD, 1, mesh.get_group()))
    model.sequence_split = meshes.layout.tensor


def overlap_collectives(meshes: Meshes) -> None:
    """Have inductor fuse each gather with the matrix products after it, and each scatter with the one before it, before
    anything is compiled. Collective. Raises ConfigError where there are no GPUs."""
    if meshes.device_type != "cuda":
        message = f"true, but it needs the symmetric memory of GPUs, and this worker runs on {meshes.device_type}"
        raise ConfigError([Problem("parallel.async_tensor_parallel", message, "set it to false")])
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symmetric_memory

    inductor._micro_pipeline_tp = True
    group = meshes.tensor.get_group().group_name
    with warnings.catch_warnings():
        # It is said to be needless; torch 2.13's own pass leaves out a group for which it was not called.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group)


def _enter_whole(module: nn.Module, mesh: DeviceMesh, dim: int, by_copy: bool = False) -> None:
    """Split the projections of `module`, whose first argument is gathered along `dim` and whose output is scattered."""
    for name, projection in module.named_children():
        if name in OUTPUT_SPLIT | INPUT_SPLIT:
            split_parameter(projection, "weight", mesh, dim=0 if name in OUTPUT_SPLIT else 1)
            if projection.bias is not None:
                assert name in OUTPUT_SPLIT, f"{name}: its output is an addend, so every rank would add the bias"
                split_parameter(projection, "bias", mesh, dim=0)
    module.register_forward_pre_hook(
        lambda module, inputs: (gather(inputs[0], dim, mesh.get_group(), by_copy), *inputs[1:])
    )
    module.register_forward_hook(lambda module, inputs, output: scatter(output, dim, mesh.get_group()))


def _look_up(embedding: Embedding, mesh: DeviceMesh, tokens_BS: Tensor) -> Tensor:
    """Rows of the table that this rank has, and zeros for the others, summed over the ranks and split along S."""
    weight_VD = local(embedding.weight)
    found_BS = tokens_BS // len(weight_VD) == mesh.get_local_rank()
    x_BSD = F.embedding(tokens_BS % len(weight_VD), weight_VD)
    return scatter(x_BSD.masked_fill(~found_BS[..., None], 0.0), 1, mesh.get_group())
