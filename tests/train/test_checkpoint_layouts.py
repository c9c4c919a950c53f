"""Checkpoints of the real model over real meshes: saved in one layout, equal in every other."""

import hashlib
from pathlib import Path

import pytest
from checkpoint_ranks import make_checkpointer
from spawn import run_distributed
from test_parity_layouts import Row, parallelized, recipe_of

from chimera_train.checkpoint import LoopState
from chimera_train.checkpoint.state import fill_optimizer_state, model_tensors, optimizer_tensors
from chimera_train.config import LayoutConfig, RecipeFile, layout
from chimera_train.model import initialize
from chimera_train.optim import build_optimizer

TENSOR = {"tensor_parallel": 2}
PAIRS = [
    (Row("tensor 2", 2, "halves", parallel=TENSOR), (Row("one process", 1, "halves"), Row("fsdp 2", 2, "halves"))),
    (
        Row("fsdp 2, tensor 2", 4, "halves, tied", parallel=TENSOR),
        (Row("fsdp 2", 2, "halves, tied"), Row("tensor 2", 2, "halves, tied", parallel=TENSOR)),
    ),
    (Row("fsdp 2", 2, "halves"), (Row("replicas 2, tensor 2", 4, "halves", parallel={**TENSOR, "data_parallel": 2}),)),
]


def digest(model, optimizer) -> str:
    """Of all whole tensors, by name."""
    tensors = model_tensors(model)
    for state in optimizer_tensors(model, optimizer).values():
        tensors |= state
    found = hashlib.sha256()
    for name in sorted(tensors):
        whole = tensors[name].full_tensor() if hasattr(tensors[name], "full_tensor") else tensors[name]
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def save_or_load(row: Row, root: Path, saves: bool) -> str:
    """On every rank of a process group: what is in the model and in the optimizer afterwards."""
    recipe = recipe_of(row)
    model, meshes = parallelized(recipe, layout(recipe.parallel, hosts=1, workers_per_host=row.ranks))
    optimizer = build_optimizer(model, recipe, meshes)
    file = RecipeFile(recipe=recipe, layout=LayoutConfig(hosts=1, workers_per_host=row.ranks), recipe_hash="a" * 64)
    checkpointer = make_checkpointer(root, world_size=row.ranks, recipe=file)
    if not saves:
        initialize(model, seed=1)
        assert checkpointer.load(model, optimizer).step == 1
        return digest(model, optimizer)
    initialize(model, seed=0)
    fill_optimizer_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # values that tell every element from its neighbours
            for scale, key in ((2.0, "exp_avg"), (3.0, "exp_avg_sq")):
                optimizer.state[parameter][key].copy_(parameter.detach() * scale)
    checkpointer.save(1, model, optimizer, LoopState(step=1, tokens_seen=1, samples_seen=1, loader={}))
    return digest(model, optimizer)


@pytest.mark.train
@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=[saved.name for saved, _ in PAIRS])
def test_what_one_layout_saves_every_other_loads(tmp_path, saved, loaded):
    digests = set(run_distributed(save_or_load, saved.ranks, saved, tmp_path, True))
    assert len(digests) == 1
    for row in loaded:
        assert set(run_distributed(save_or_load, row.ranks, row, tmp_path, False)) == digests, row.name
