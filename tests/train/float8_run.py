"""A short run in float8, emulated on CPUs: what its steps compute, and what they send.

A row is a name, ranks, and what differs from the plain recipe.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensors import whole
from torch.utils._python_dispatch import TorchDispatchMode

from chimera_train.checkpoint import Checkpointer, LoopState
from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    MlRoot,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecipeFile,
    TrainConfig,
    TrainRecipe,
    batch_plan,
    layout,
)
from chimera_train.model import initialize
from chimera_train.optim import build_optimizer
from chimera_train.parallel import Meshes, Pipeline, build_model, free_gathered, refresh_scales
from chimera_train.step import finish_gradients, forward_backward, forward_only

CPU = torch.device("cpu")
SEQUENCE, VOCAB = 32, 64
MODEL = ModelConfig(
    name="m", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    initializer_range=0.1, attention_bias=True,
)  # fmt: skip
DEEP = replace(MODEL, num_layers=4)
"""A layer for each of the stages of a pipeline."""


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    model: ModelConfig = MODEL
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    """Beside float8=tensorwise."""
    optim: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    """Sequences of a step."""
    steps: int = 2
    resumed: bool = False
    """The last step is that of a run which has loaded a checkpoint."""


def recipe_of(row: Row, *, gather: bool = False) -> TrainRecipe:
    return TrainRecipe(
        name="float8",
        model=row.model,
        parallel=ParallelConfig(**row.parallel),
        train=TrainConfig(
            num_steps=row.steps,
            global_batch_size=row.batch,
            micro_batch_size=1,
            sequence_length=SEQUENCE,
            **row.train,
        ),
        data=DataConfig(name="none"),
        optim=OptimConfig(learning_rate=3e-2, warmup_steps=0, **row.optim),
        precision=PrecisionConfig(name="p", **({"float8": "tensorwise", "float8_all_gather": gather} | row.precision)),
        checkpoint=CheckpointConfig(interval_steps=0),
    )


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    """Before every step but the first: the loss summed over a micro-batch, without gradients."""
    grads: dict[str, torch.Tensor]
    """Of the last step."""
    weights: dict[str, torch.Tensor]
    """After it."""
    gathered_bytes: int
    """That this rank gave to FSDP's all-gathers in the last step."""
    all_reduces: int
    """In the last step."""


class Gathers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes, self.counts = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.counts[name] += 1
        if name == "c10d::_allgather_base_":
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def run(row: Row, folder: Path, *, gather: bool = False) -> Run:
    """On every rank of a process group. gather: precision.float8_all_gather."""
    recipe = recipe_of(row, gather=gather)
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=row.ranks)
    plan = batch_plan(recipe.train, mesh_layout)
    meshes = Meshes(mesh_layout, "cpu")
    file = RecipeFile(recipe=recipe, layout=LayoutConfig(hosts=1, workers_per_host=row.ranks), recipe_hash="0")

    def build():
        torch.compiler.reset()
        model = build_model(recipe, meshes, CPU, compile_backend="aot_eager")
        optimizer = build_optimizer(model, recipe, meshes)
        checkpointer = Checkpointer(recipe.checkpoint, root=MlRoot(folder), run_id="r", recipe=file, layout=mesh_layout)
        return model, optimizer, checkpointer

    model, optimizer, checkpointer = build()
    initialize(model, recipe.train.seed)
    share = recipe.train.global_batch_size // plan.data_parallel_size
    first = mesh_layout.data_rank(dist.get_rank()) * share
    found = Run([], [], [], {}, {}, 0, 0)
    for step in range(1, row.steps + 1):
        batch = np.random.default_rng(step).integers(0, VOCAB, (recipe.train.global_batch_size, SEQUENCE + 1))
        mine = batch[first : first + share]
        if step > 1:
            refresh_scales(model)
            for micro_batch in mine[:1], mine[1:2]:
                sums = forward_only(model, micro_batch, CPU)
                found.evaluated.append(sums[0].item())
            if not isinstance(model, Pipeline):
                free_gathered(model)
        gathers = Gathers()
        with nullcontext() if recipe.train.compile else gathers:  # torch compiles nothing under such a mode
            sums = forward_backward(model, recipe, np.split(mine, plan.accumulation_steps), CPU)
        found.gathered_bytes, found.all_reduces = gathers.bytes, gathers.counts["c10d::allreduce_"]
        result = finish_gradients(model, recipe.optim, sums, meshes, step=step)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        found.grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if step == row.steps - 1 and row.resumed:
            checkpointer.save(step, model, optimizer, LoopState(step=step, tokens_seen=0, samples_seen=0))
            model, optimizer, checkpointer = build()
            assert checkpointer.load(model, optimizer) is not None
    found.weights = {name: whole(p) for name, p in model.named_parameters()}
    return found
