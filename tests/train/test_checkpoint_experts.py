"""Checkpoints of a mixture of experts between layouts: what is saved on one mesh is the same on any other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import make_checkpointer
from spawn import run_distributed
from tensors import whole
from test_parity_layouts import MODELS, Row, global_batch, recipe_of
from torch import Tensor

from chimera_train.checkpoint import LoopState
from chimera_train.config import layout
from chimera_train.model import Decoder, initialize
from chimera_train.optim import build_optimizer
from chimera_train.parallel import Meshes, RouterBias, parallelize
from chimera_train.step import finish_gradients, forward_backward

pytestmark = pytest.mark.train


@dataclass
class Layout:
    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)


ONE = Layout(1)
EXPERTS_2 = Layout(2, {"expert_parallel": 2})
FSDP_4 = Layout(4)
EXPERTS_2_FSDP_2 = Layout(4, {"expert_parallel": 2})
EXPERTS_4_TENSOR_2 = Layout(4, {"expert_parallel": 4, "tensor_parallel": 2})
EXPERTS_2_FSDP_3 = Layout(6, {"expert_parallel": 2})
"""Three ranks share the rows of four experts, which three does not divide."""


def run(folder: Path, where: Layout, steps: int, seed: int) -> dict[str, Tensor]:
    """Load what is there, train `steps` with the same data on every rank, save; every tensor of the state, whole."""
    recipe = recipe_of(Row("checkpoint", where.ranks, model="halves, deepseek", parallel=where.parallel))
    meshes = Meshes(layout(recipe.parallel, hosts=1, workers_per_host=where.ranks), "cpu")
    with torch.device("meta"):
        model = Decoder(MODELS["halves, deepseek"])
    parallelize(model, recipe, meshes)
    model.to_empty(device="cpu")
    initialize(model, seed)
    optimizer = build_optimizer(model, recipe, meshes)
    router_bias = RouterBias(model, recipe.model, meshes)
    checkpointer = make_checkpointer(folder, world_size=where.ranks)
    state = checkpointer.load(model, optimizer)
    step = state.step if state is not None else 0
    for _ in range(steps):
        step += 1
        sums = forward_backward(model, recipe, [global_batch(step, masked=False)[:2]], torch.device("cpu"))
        finish_gradients(model, recipe.optim, sums, meshes, step=step)
        optimizer.step()
        router_bias.step()
        optimizer.zero_grad()
    if steps:
        checkpointer.save(step, model, optimizer, LoopState(step=step, tokens_seen=0, samples_seen=0, loader={}))
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = whole(value)
    return found


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (EXPERTS_2_FSDP_2, [ONE, EXPERTS_2, FSDP_4, EXPERTS_4_TENSOR_2]),
        (EXPERTS_2_FSDP_3, [ONE, EXPERTS_2_FSDP_2]),
        (ONE, [EXPERTS_2]),
        (EXPERTS_4_TENSOR_2, [EXPERTS_2]),
    ],
    ids=["experts 2 x fsdp 2", "experts 2 x fsdp 3, uneven", "one process", "experts 4, tensor 2"],
)
def test_every_tensor_is_the_same_on_another_mesh(tmp_path: Path, saved_by: Layout, loaded_by: list[Layout]):
    saved = run_distributed(run, saved_by.ranks, tmp_path, saved_by, 2, 0)
    biases = [tensor for name, tensor in saved[0].items() if name.endswith("expert_bias")]
    assert biases
    assert all(bias.abs().max() > 0 for bias in biases), "nothing to compare"
    assert any("exp_avg" in name for name in saved[0])
    for where in loaded_by:
        for loaded in run_distributed(run, where.ranks, tmp_path, where, 0, 1):
            assert loaded.keys() == saved[0].keys()
            for name, tensor in loaded.items():
                assert torch.equal(tensor, saved[0][name]), f"{name} on {where}"
