"""Parallelism, applied to a model that knows nothing of it: checkpointing → compile → FSDP, in this order.

FSDP2 shards every block, the embedding and the head as a group each (over `fully_sharded`; with replicas over
`data_parallel` × `fully_sharded`, hybrid sharding). Parameters keep their names; they become DTensors.
"""

from __future__ import annotations

import os
import shutil
import sys

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .activation_checkpoint import apply_activation_checkpointing
from .config import ConfigError, MeshLayout, Problem, TrainRecipe
from .config.mesh import SUPPORTED_AXES
from .model import Decoder

REPLICATE, SHARD = "data_parallel", "fully_sharded"


def check_supported(layout: MeshLayout) -> None:
    """Raise ConfigError for every axis whose degree the trainer cannot run."""
    degrees = {axis: getattr(layout, axis) for axis in ("pipeline", "context", "tensor", "expert")}
    problems = [
        Problem(
            f"parallel.{axis}_parallel",
            f"{degree}, but this trainer runs {' and '.join(SUPPORTED_AXES)} only",
            f"set parallel.{axis}_parallel=1",
        )
        for axis, degree in degrees.items()
        if degree > 1 and axis not in SUPPORTED_AXES
    ]
    if problems:
        raise ConfigError(problems)


def build_mesh(layout: MeshLayout, device_type: str) -> DeviceMesh:
    """`fully_sharded` alone, or `data_parallel` × `fully_sharded` where there are replicas."""
    if layout.data_parallel > 1:
        shape = (layout.data_parallel, layout.fully_sharded)
        return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
    return init_device_mesh(device_type, (layout.fully_sharded,), mesh_dim_names=(SHARD,))


def parallelize(model: Decoder, recipe: TrainRecipe, mesh: DeviceMesh, *, compile_backend: str = "inductor") -> None:
    """Apply the recipe's techniques in place. `model` may be on the meta device. Raises ConfigError where the machine
    lacks what compiling needs."""
    for block in model.layers:
        apply_activation_checkpointing(block, recipe.train.activation_checkpointing)
    if recipe.train.compile:
        if compile_backend == "inductor" and mesh.device_type == "cpu":
            _check_compiler()
        for block in model.layers:
            # The forward alone, so that FSDP's hooks stay outside of the graph.
            block.forward = torch.compile(block.forward, backend=compile_backend, fullgraph=True)
    _shard(model, recipe, mesh)


def _check_compiler() -> None:
    """On a CPU inductor writes C++, and compiles it with what CXX names or by the name below
    (torch._inductor.config.cpp.cxx). Without it the first step would fail in the middle of torch."""
    compiler = (os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"])[0]
    if shutil.which(compiler) is None:
        message = f"compiling needs a C++ compiler, and this machine has none ({compiler} is not there)"
        fix = "set train.compile=false, or install g++ (Debian: build-essential), or name one in CXX"
        raise ConfigError([Problem("train.compile", message, fix)])


def _shard(model: Decoder, recipe: TrainRecipe, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision.param_dtype),
        reduce_dtype=getattr(torch, recipe.precision.reduce_dtype),
        # Blocks already get activations in param_dtype; the tables of rotary positions must stay float32.
        cast_forward_inputs=False,
    )
    for block in model.layers:
        # Backward begins with the last block, so freeing it in between would only gather it twice.
        reshard = recipe.parallel.reshard_after_forward and block is not model.layers[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if model.head is not None:
        # Neither is read in backward: an embedding's gradient needs indices only, and the loss computes the head's
        # gradients in forward. So they are freed after forward and not gathered again.
        for module in (model.embedding, model.head):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            module.set_unshard_in_backward(False)
    # A tied embedding is used at both ends of the model, so it belongs to the root, which stays whole in between.
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
