"""Where parameters fall: how many a rank of a pipeline computes with, and how many of them it stores."""

from __future__ import annotations

from dataclasses import dataclass

from chimera_train.config import MeshLayout, ModelConfig
from chimera_train.config.flops import (
    attention_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    expert_parameters,
    unsplit_attention_parameters,
)
from chimera_train.config.stages import stages


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Parameters of one rank's pipeline stages, after tensor and expert parallel, before sharding."""

    layers: int
    dense: float
    """Attention, norms, routers, dense MLPs, shared experts, embedding and head."""
    experts: float
    """This rank's share of the experts."""
    largest_unit: float
    """The largest piece that is gathered at once: a layer, or the embedding or head."""
    stored: float
    """What the rank keeps of all of them after sharding."""
    stored_tables: float
    """Embedding and head in `stored`."""

    @property
    def gathered(self) -> float:
        return self.dense + self.experts


def stage_parameters(model: ModelConfig, layout: MeshLayout, rank: int) -> StageParameters:
    """The parameters of the stages of a rank, given by its coordinate on the pipeline axis. The first stage has the
    embedding, the last the final norm and the head; a tied matrix is in both.

    Dense parameters are sharded over fully_sharded × context ranks; an expert belongs to one expert-parallel rank and
    is sharded over the ranks of that group that are left.
    """
    cut = stages(model, layout.num_stages)
    held = [cut[number] for number in layout.stage_numbers(rank)]
    numbers = [number for stage in held for number in stage.layers]
    layers = len(numbers)
    experts_layers = sum(model.has_experts(number) for number in numbers)
    unsplit = unsplit_attention_parameters(model)
    outside = unsplit + (attention_parameters(model) - unsplit) / layout.tensor + 2 * model.hidden_size
    dense_layer = outside + dense_mlp_parameters(model) / layout.tensor
    expert_layer = expert_parameters(model) * model.num_experts / layout.expert if experts_layers else 0.0
    # The router and the shared experts are whole on every rank of the tensor axis.
    beside_experts = outside + model.hidden_size * model.num_experts
    beside_experts += expert_parameters(model) * model.num_shared_experts
    table = embedding_parameters(model) / layout.tensor
    last = held[-1].last
    tables = held[0].first + last
    if layout.num_stages == 1 and model.tie_embeddings:
        tables = 1
    dense = (layers - experts_layers) * dense_layer + experts_layers * beside_experts
    dense += tables * table + (model.hidden_size if last else 0)
    experts = experts_layers * expert_layer
    units = [table] if tables else []
    units += [beside_experts + expert_layer] if experts_layers else []
    units += [dense_layer] if experts_layers < layers else []
    return StageParameters(
        layers=layers,
        dense=dense,
        experts=experts,
        largest_unit=max(units),
        stored=dense / layout.shard + experts / layout.expert_shard,
        stored_tables=tables * table / layout.shard,
    )
