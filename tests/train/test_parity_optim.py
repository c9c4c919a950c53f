"""Optimizers on shards against the same on one process: weights and states after some steps, and after a reshard.

Gradients are given, equal on all ranks, so that what differs is the optimizer alone. Sizes do not divide over ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from spawn import run_distributed
from tensors import whole
from torch.distributed.tensor import DTensor, distribute_tensor

from chimera_train.checkpoint.state import fill_optimizer_state, model_tensors, optimizer_tensors
from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    TrainRecipe,
    layout,
)
from chimera_train.model import Decoder, initialize
from chimera_train.optim import build_optimizer
from chimera_train.parallel import Meshes, parallelize

DENSE = ModelConfig(
    name="dense", vocab_size=67, hidden_size=40, intermediate_size=136, num_layers=1, num_heads=5, num_kv_heads=1
)
MODELS = {"dense": DENSE, "moe": replace(DENSE, num_experts=3, experts_per_token=2)}
STEPS, RESHARD_AT = 4, 2
BF16 = {"master_weights": False}


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    optim: dict[str, Any]
    model: str = "dense"
    precision: dict[str, Any] | None = None
    """None: float32 throughout."""
    data_parallel: int = 1
    exact: bool = False
    """Elements are treated alike wherever they are, so every bit is the one process's."""


ROWS = [
    Row("lion, fsdp 2", 2, {"name": "lion", "beta2": 0.99}, exact=True),
    Row("muon, fsdp 2", 2, {"name": "muon"}),
    Row("muon, fsdp 2, moe", 2, {"name": "muon"}, model="moe"),
    Row("adamw in bfloat16, fsdp 2", 2, {"state_dtype": "bfloat16"}, precision=BF16, exact=True),
    Row("adamw, 8-bit states, fsdp 2", 2, {"state_dtype": "int8"}, exact=True),
    Row("lion, 8-bit states, moe, bf16 weights, fsdp 3", 3, {"name": "lion", "state_dtype": "int8"}, model="moe",
        precision=BF16, exact=True),
    Row("muon, fsdp 3, moe", 3, {"name": "muon", "state_dtype": "int8"}, model="moe"),
    Row("adamw, bf16 states, hsdp 2x2", 4, {"state_dtype": "bfloat16"}, data_parallel=2, exact=True),
    Row("muon, hsdp 2x2", 4, {"name": "muon"}, data_parallel=2),
]  # fmt: skip


def recipe_of(row: Row, data_parallel: int) -> TrainRecipe:
    precision = {"param_dtype": "float32"} if row.precision is None else row.precision
    return TrainRecipe(
        name="parity",
        model=MODELS[row.model],
        parallel=ParallelConfig(data_parallel=data_parallel),
        train=TrainConfig(num_steps=STEPS, global_batch_size=4, micro_batch_size=1, sequence_length=16),
        data=DataConfig(name="none"),
        optim=OptimConfig(learning_rate=1e-2, **row.optim),
        precision=PrecisionConfig(name="p", **precision),
        checkpoint=CheckpointConfig(interval_steps=0),
    )


def build(row: Row, ranks: int, data_parallel: int) -> tuple[Decoder, torch.optim.Optimizer]:
    recipe = recipe_of(row, data_parallel)
    meshes = Meshes(layout(recipe.parallel, hosts=1, workers_per_host=ranks), "cpu")
    with torch.device("meta"):
        model = Decoder(recipe.model)
    parallelize(model, recipe, meshes)
    model.to_empty(device="cpu")
    initialize(model, recipe.train.seed)
    return model, build_optimizer(model, recipe, meshes)


def steps(model: Decoder, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        optimizer.step()


def tensors(model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = model_tensors(model)
    for state in optimizer_tensors(model, optimizer).values():
        found |= state
    return found


def run(row: Row, ranks: int, folder: str) -> dict[str, torch.Tensor]:
    """Whole tensors after all steps. Half way a checkpoint is written, with several ranks, and read back into
    new objects, one of which is on another mesh."""
    data_parallel = row.data_parallel if ranks > 1 else 1
    model, optimizer = build(row, ranks, data_parallel)
    steps(model, optimizer, 1, RESHARD_AT)
    if ranks > 1:
        path = f"{folder}/{row.name.replace(' ', '-')}"
        dcp.save(tensors(model, optimizer), checkpoint_id=path)
        # All ranks as replicas and shards the other way round, where their number allows it.
        model, optimizer = build(row, ranks, ranks if data_parallel == 1 else 1)
        fill_optimizer_state(optimizer)
        dcp.load(tensors(model, optimizer), checkpoint_id=path)
    steps(model, optimizer, RESHARD_AT + 1, STEPS)
    return {n: whole(t) for n, t in tensors(model, optimizer).items()}


def run_rows(rows: list[Row], ranks: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {row.name: {n: t.detach().clone() for n, t in run(row, ranks, folder).items()} for row in rows}


@functools.cache
def launched(ranks: int, folder: Path) -> list[dict[str, dict[str, torch.Tensor]]]:
    rows = ROWS if ranks == 1 else [row for row in ROWS if row.ranks == ranks]
    return run_distributed(run_rows, ranks, rows, ranks, str(folder), timeout_s=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_shards_give_the_weights_and_states_of_one_process(row: Row, folder: Path):
    expected = launched(1, folder)[0][row.name]
    for found in launched(row.ranks, folder):
        assert found[row.name].keys() == expected.keys()
        for name, tensor in expected.items():
            if row.exact:
                assert torch.equal(found[row.name][name], tensor), name
            else:
                torch.testing.assert_close(found[row.name][name], tensor, atol=1e-5, rtol=0, msg=name)
