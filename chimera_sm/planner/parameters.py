"""Where parameters fall: how many a rank of a pipeline stage computes with, and how many of them it stores."""

from __future__ import annotations

from dataclasses import dataclass

from chimera_train.config import MeshLayout, ModelConfig
from chimera_train.config.flops import (
    attention_parameters,
    embedding_parameters,
    mlp_parameters,
    unsplit_attention_parameters,
)


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Parameters of one rank of one pipeline stage, after tensor and expert parallel, before sharding."""

    layers: int
    dense: float
    """Attention, norms, routers, dense MLPs, embedding and head."""
    experts: float
    """This rank's share of the experts."""
    largest_unit: float
    """The largest piece that is gathered at once: a layer, or the embedding or head."""
    stored: float
    """What the rank keeps of all of them after sharding."""

    @property
    def gathered(self) -> float:
        return self.dense + self.experts


def stage_parameters(model: ModelConfig, layout: MeshLayout, stage: int) -> StageParameters:
    """The parameters of `stage` (0-based). The first stage has the embedding, the last the final norm and the head;
    a tied matrix is on both.

    Dense parameters are sharded over fully_sharded × context ranks; an expert belongs to one expert-parallel rank and
    is sharded over the ranks of that group that are left.
    """
    layers = model.num_layers // layout.pipeline
    mlp = mlp_parameters(model) / layout.tensor
    unsplit = unsplit_attention_parameters(model)
    dense_layer = unsplit + (attention_parameters(model) - unsplit) / layout.tensor + 2 * model.hidden_size
    expert_layer = 0.0
    if model.num_experts:
        dense_layer += model.hidden_size * model.num_experts
        expert_layer = mlp * model.num_experts / layout.expert
    else:
        dense_layer += mlp
    table = embedding_parameters(model) / layout.tensor
    first, last = stage == 0, stage == layout.pipeline - 1
    tables = first + last
    if first and last and model.tie_embeddings:
        tables = 1
    dense = layers * dense_layer + tables * table + (model.hidden_size if last else 0)
    experts = layers * expert_layer
    shards = layout.fully_sharded * layout.context
    return StageParameters(
        layers=layers,
        dense=dense,
        experts=experts,
        largest_unit=max(dense_layer + expert_layer, table if tables else 0.0),
        stored=dense / shards + experts * layout.expert / shards,
    )
