"""Checkpoints of the real model over real meshes: saved in one layout, equal in every other."""

import hashlib
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import make_checkpointer
from spawn import run_distributed
from tensors import whole
from test_parity_layouts import Row, parallelized, recipe_of

from chimera_train.checkpoint import LoopState
from chimera_train.checkpoint.state import fill_optimizer_state, model_tensors, optimizer_tensors
from chimera_train.config import LayoutConfig, RecipeFile, layout
from chimera_train.model import initialize
from chimera_train.optim import build_optimizer

TENSOR = {"tensor_parallel": 2}
PIPELINE, V_SHAPED = {"pipeline_parallel": 2}, {"pipeline_parallel": 4, "pipeline_schedule": "zbv"}
PAIRS = [
    (Row("tensor 2", 2, "halves", parallel=TENSOR), (Row("one process", 1, "halves"), Row("fsdp 2", 2, "halves"))),
    (
        Row("fsdp 2, tensor 2", 4, "halves, tied", parallel=TENSOR),
        (Row("fsdp 2", 2, "halves, tied"), Row("tensor 2", 2, "halves, tied", parallel=TENSOR)),
    ),
    (Row("fsdp 2", 2, "halves"), (Row("replicas 2, tensor 2", 4, "halves", parallel={**TENSOR, "data_parallel": 2}),)),
    (
        Row("pipeline 2", 2, "deep tied", parallel=PIPELINE),
        (Row("one process", 1, "deep tied"), Row("pipeline 4, v-shaped", 4, "deep tied", parallel=V_SHAPED)),
    ),
    (
        Row("pipeline 4, v-shaped", 4, "deep tied", parallel=V_SHAPED),
        (Row("pipeline 2, fsdp 2", 4, "deep tied", parallel=PIPELINE),),
    ),
    (Row("one process", 1, "deep tied"), (Row("pipeline 2", 2, "deep tied", parallel=PIPELINE),)),
]


def digests(model, optimizer) -> dict[str, str]:
    """Of the whole tensors that this rank has a part of, by name."""
    tensors = model_tensors(model)
    for state in optimizer_tensors(model, optimizer).values():
        tensors |= state
    return {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return whole(tensor).contiguous().numpy().tobytes()


def save_or_load(row: Row, root: Path, saves: bool) -> dict[str, str]:
    """On every rank of a process group: what is in the model and in the optimizer afterwards."""
    recipe = recipe_of(row)
    model, meshes = parallelized(recipe, layout(recipe.parallel, hosts=1, workers_per_host=row.ranks))
    optimizer = build_optimizer(model, recipe, meshes)
    file = RecipeFile(recipe=recipe, layout=LayoutConfig(hosts=1, workers_per_host=row.ranks), recipe_hash="a" * 64)
    checkpointer = make_checkpointer(root, world_size=row.ranks, recipe=file)
    if not saves:
        initialize(model, seed=1)
        assert checkpointer.load(model, optimizer).step == 1
        return digests(model, optimizer)
    initialize(model, seed=0)
    fill_optimizer_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # values that tell every element from its neighbours
            for scale, key in ((2.0, "exp_avg"), (3.0, "exp_avg_sq")):
                optimizer.state[parameter][key].copy_(parameter.detach() * scale)
    checkpointer.save(1, model, optimizer, LoopState(step=1, tokens_seen=1, samples_seen=1, loader={}))
    return digests(model, optimizer)


def of_all_ranks(row: Row, root: Path, saves: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for of_rank in run_distributed(save_or_load, row.ranks, row, root, saves):
        assert all(found.get(name, digest) == digest for name, digest in of_rank.items()), "ranks disagree"
        found |= of_rank
    return found


@pytest.mark.train
@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=[saved.name for saved, _ in PAIRS])
def test_what_one_layout_saves_every_other_loads(tmp_path, saved, loaded):
    written = of_all_ranks(saved, tmp_path, True)
    for row in loaded:
        assert of_all_ranks(row, tmp_path, False) == written, row.name
