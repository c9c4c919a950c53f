"""This rank's part of the model, with every technique of the recipe applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config import TrainRecipe
from ..config.stages import stages
from ..model import Decoder
from .apply import parallelize
from .low_precision import gather_in_float8
from .meshes import Meshes
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .float8_gather import Float8Gather

_GATHER = "float8_gather"
"""Attribute of a model whose weights are gathered in 8 bits; the model itself knows nothing of it."""


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
    model = parts[0] if meshes.layout.pipeline == 1 else Pipeline(parts, recipe, meshes)
    setattr(model, _GATHER, gather_in_float8(parts, recipe.precision, meshes))
    return model


def refresh_scales(model: Decoder | Pipeline) -> None:
    """At the start of a step, and of anything else that computes with weights that may have changed since: by the
    optimizer, or by a checkpoint. Collective where weights are gathered in 8 bits; nothing elsewhere."""
    gather: Float8Gather | None = getattr(model, _GATHER, None)
    if gather is not None:
        gather.refresh()
