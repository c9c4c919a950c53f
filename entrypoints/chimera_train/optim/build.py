"""The optimizer that a recipe names."""

from __future__ import annotations

import torch
from torch import nn

from ..config import TrainRecipe
from ..parallel import Meshes
from .groups import decays


def build_optimizer(model: nn.Module, recipe: TrainRecipe, meshes: Meshes) -> torch.optim.Optimizer:
    """`model` is parallelized and has storage. Collective: call on all ranks alike."""
    optim = recipe.optim
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": optim.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )
