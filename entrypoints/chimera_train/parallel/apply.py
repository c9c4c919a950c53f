"""Parallelism, applied to a model that knows nothing of it, in this order: tensor → experts → context →
8-bit products → checkpointing → compile → offload → FSDP."""

from __future__ import annotations

import os
import shutil
import sys

import torch
from torch._functorch import config as functorch_config

from ..config import ConfigError, Problem, TrainRecipe, flash_problems
from ..model import Decoder
from ..model.decoder import Block
from ..model.moe import LocalDispatch, MixtureOfExperts
from .activation_checkpoint import apply_activation_checkpointing
from .activation_offload import Offload
from .context import apply_context_parallel
from .expert import apply_expert_parallel
from .fsdp import shard
from .low_precision import apply_low_precision
from .meshes import Meshes
from .tensor import apply_tensor_parallel, overlap_collectives


def parallelize(model: Decoder, recipe: TrainRecipe, meshes: Meshes, *, compile_backend: str = "inductor") -> None:
    """Apply the recipe's techniques in place. `model` may be on the meta device. Raises ConfigError where the machine
    lacks what compiling needs."""
    check_flash_attention(recipe, meshes.device_type)
    if not recipe.precision.master_weights:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, recipe.precision.param_dtype))
    apply_tensor_parallel(model, meshes, overlapped=recipe.parallel.async_tensor_parallel)
    if recipe.parallel.async_tensor_parallel:
        overlap_collectives(meshes)
    apply_expert_parallel(model, meshes)
    apply_context_parallel(model, recipe.parallel.context_backend, meshes)
    apply_low_precision(model, recipe.precision, meshes.device_type)
    for number, block in model.layers.items():
        if int(number) % recipe.train.activation_checkpointing_every == 0:
            apply_activation_checkpointing(block, recipe.train.activation_checkpointing)
    if recipe.train.compile:
        if compile_backend == "inductor" and meshes.device_type == "cpu":
            _check_compiler()
        budget = recipe.train.activation_memory_budget
        functorch_config.activation_memory_budget = 1.0 if budget is None else budget
        for block in model.layers.values():
            part = block if _is_one_graph(block) else block.attention
            # The forward alone, so that FSDP's hooks stay outside of the graph.
            part.forward = torch.compile(part.forward, backend=compile_backend, fullgraph=True)
    if recipe.train.activation_offload:
        offload = Offload(meshes.device_type)
        for block in model.layers.values():
            offload.apply(block)
    shard(model, recipe, meshes)


def _is_one_graph(block: Block) -> bool:
    """Not where the host must know how many tokens travel, or a count is kept in backward: then the attention alone."""
    mixture = block.feed_forward
    if not isinstance(mixture, MixtureOfExperts):
        return True
    return isinstance(mixture.dispatch, LocalDispatch) and not mixture.config.router_bias_update_speed


def _check_compiler() -> None:
    """On a CPU inductor writes C++, and compiles it with what CXX names or by the name below
    (torch._inductor.config.cpp.cxx). Without it the first step would fail in the middle of torch."""
    compiler = (os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"])[0]
    if shutil.which(compiler) is None:
        message = f"compiling needs a C++ compiler, and this machine has none ({compiler} is not there)"
        fix = "set train.compile=false, or install g++ (Debian: build-essential), or name one in CXX"
        raise ConfigError([Problem("train.compile", message, fix)])


def check_flash_attention(recipe: TrainRecipe, device_type: str) -> None:
    """Raise ConfigError where `model.flash` or `ring` would be given float32 on a GPU, whose kernel would fail in the
    first step."""
    if device_type == "cuda" and (problems := flash_problems(recipe)):
        raise ConfigError(problems)
