"""How much of a block's forward is kept for backward, by the recipe's setting."""

import pytest
import torch
from spawn import run_distributed
from test_parity_layouts import SEQUENCE, VOCAB, Row, recipe_of

from chimera_train.config import layout
from chimera_train.model import Decoder, initialize
from chimera_train.parallel import Meshes, parallelize

SETTINGS = {
    "all": {"compile": True},
    "half": {"compile": True, "activation_memory_budget": 0.5},
    "least": {"compile": True, "activation_memory_budget": 0.01},
    "full checkpointing": {"activation_checkpointing": "full"},
}


def kept_bytes(train: dict) -> int:
    torch.compiler.reset()
    recipe = recipe_of(Row("memory", 1, train=train))
    meshes = Meshes(layout(recipe.parallel, hosts=1, workers_per_host=1), "cpu")
    with torch.device("meta"):
        model = Decoder(recipe.model)
    parallelize(model, recipe, meshes, compile_backend="aot_eager")
    model.to_empty(device="cpu")
    initialize(model, 0)
    weights = {tuple(p.shape) for p in model.parameters()} | {tuple(reversed(p.shape)) for p in model.parameters()}
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.nbytes if tuple(tensor.shape) not in weights else 0
        return tensor

    tokens = torch.randint(0, VOCAB, (2, SEQUENCE + 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    return kept


def all_settings() -> dict[str, int]:
    return {name: kept_bytes(train) for name, train in SETTINGS.items()}


@pytest.mark.train
def test_a_smaller_budget_keeps_less():
    kept = run_distributed(all_settings, 1)[0]
    assert kept["all"] > 1.5 * kept["half"] > 1.5 * 1.2 * kept["least"], kept
    assert kept["least"] < 2 * kept["full checkpointing"] + 100_000, kept
