"""This rank's part of the model, with every technique of the recipe applied."""

from __future__ import annotations

import torch

from ..config import TrainRecipe
from ..config.stages import stages
from ..model import Decoder
from .apply import parallelize
from .meshes import Meshes
from .pipeline import Pipeline


def build_model(
    recipe: TrainRecipe, meshes: Meshes, device: torch.device, *, compile_backend: str = "inductor"
) -> Decoder | Pipeline:
    """Parameters have memory on `device`, and no values yet. Collective."""
    cut = stages(recipe.model, meshes.layout.num_stages)
    parts = []
    for number in meshes.layout.stage_numbers(meshes.at["pipeline"]):
        with torch.device("meta"):
            part = Decoder(
                recipe.model,
                stage=cut[number],
                loss_chunk_tokens=recipe.train.loss_chunk_tokens,
                z_loss=recipe.train.z_loss,
            )
        parallelize(part, recipe, meshes, compile_backend=compile_backend)
        part.to_empty(device=device)
        parts.append(part)
    return parts[0] if meshes.layout.pipeline == 1 else Pipeline(parts, recipe, meshes)
