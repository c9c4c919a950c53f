"""The optimizer that a recipe names."""

from __future__ import annotations

import torch
from torch import nn

from ..config import ConfigError, Problem, TrainRecipe
from ..parallel import Meshes
from .groups import decays, is_orthogonalised, matrices_in
from .muon import Muon
from .rules import ADAMW, LION, Group
from .sharded import ShardedOptimizer


def build_optimizer(model: nn.Module, recipe: TrainRecipe, meshes: Meshes) -> torch.optim.Optimizer:
    """`model` is parallelized and has storage. Collective: call on all ranks alike.

    Raises ConfigError where states are to be offloaded from a device that is the host itself.
    """
    optim = recipe.optim
    if optim.offload and meshes.device_type == "cpu":
        message = "moves optimizer states out of a GPU's memory, and this worker computes on the CPU"
        raise ConfigError([Problem("optim.offload", message, "set optim.offload=false")])
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    defaults = {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    plain = optim.state_dtype == "float32" and recipe.precision.master_weights and not optim.offload
    if optim.name == "adamw" and plain:
        return torch.optim.AdamW(_groups(named, optim.weight_decay), **defaults, fused=True)
    options = {
        "names": {p: n for n, p in named},
        "seed": recipe.train.seed,
        "state_dtype": optim.state_dtype,
        "on_host": optim.offload,
        "defaults": defaults,
    }
    if optim.name != "muon":
        rule = ADAMW if optim.name == "adamw" else LION
        return ShardedOptimizer(_groups(named, optim.weight_decay), rule, **options)
    matrices = [(n, p) for n, p in named if is_orthogonalised(n, p)]
    others = [(n, p) for n, p in named if not is_orthogonalised(n, p)]
    group: Group = {
        "params": [p for _, p in matrices],
        "weight_decay": optim.weight_decay,
        "momentum": optim.muon_momentum,
    }
    return Muon(
        [group, *_groups(others, optim.weight_decay)],
        group=meshes.group("fully_sharded", "context", "tensor"),
        dtype=getattr(torch, recipe.precision.param_dtype),
        stacks={p: matrices_in(n, recipe.model.num_experts) for n, p in matrices},
        **options,
    )


def _groups(named: list[tuple[str, nn.Parameter]], weight_decay: float) -> list[Group]:
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
