"""What decides the time of a step: numbers alone, of one training run or of many.

Recipes, published measurements and a search all become cases, so one model predicts them and one fit serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .arrays import Flag, Label, Labels, Number


@dataclass(frozen=True, kw_only=True)
class Case:
    """Each field is a value, or an array over cases.

    Ranks are what tensor, pipeline, context and data parallel count: GPUs, or NeuronCores. Hardware is of one rank.
    """

    # Hardware
    family: Label
    """Of the accelerator, as in `catalog.Instance`."""
    peak_tflops: Number
    """Dense bf16."""
    memory_gb_s: Number
    link_gb_s: Number
    """To others of its link domain, one way."""
    switched_link: Flag
    network_gb_s: Number
    """Its share of the host's network, one way."""
    per_host: Number
    """Ranks of a host."""
    link_domain: Number
    """Ranks that reach each other without the network: those of a host, or of a rack of NVLink."""

    # Software
    stack: Label
    """Family of the training framework (data/stacks.csv)."""
    precision: Label
    """Of the matrix products: `bf16` (fp16 too), `fp8`, `mxfp8`, `nvfp4`."""
    compiled: Flag
    """Operations between products are fused."""
    flash: Flag
    """Attention keeps no scores in memory."""
    released: Number
    """Months from January 2022 to the framework's release; NaN where it is not known."""

    # Model
    layers: Number
    expert_layers: Number
    hidden: Number
    query_width: Number
    """Channels of all query heads together."""
    value_width: Number
    """Channels of the values that all query heads read."""
    key_value_width: Number
    """Channels of all keys and values."""
    head_width: Number
    """Channels of one query head."""
    heads: Number
    mlp_width: Number
    """Of a dense layer."""
    attention_parameters: Number
    """Of one layer."""
    mlp_parameters: Number
    """Of one dense layer."""
    num_experts: Number
    experts_per_token: Number
    expert_width: Number
    expert_parameters: Number
    """Of one expert."""
    shared_experts: Number
    """As many routed experts' worth of parameters that every token passes through."""
    vocabulary: Number
    attended: Number
    """Twice the keys that a query sees on average: the sequence, or less through a window."""

    # Batch
    sequence: Number
    micro_batch: Number
    """Sequences."""
    micro_batches: Number
    """One rank's, of a step."""

    # Layout
    world: Number
    """Ranks."""
    tensor: Number
    pipeline: Number
    stages_per_rank: Number
    context: Number
    expert: Number
    shard: Number
    """Ranks that a dense parameter is sharded over (1: replicated)."""
    replicas: Number
    """Of the model over data, beyond its shards, context included."""
    idle_micro_batches: Number
    """Time that the pipeline leaves a rank without work."""
    shards_optimizer: Flag
    """Replicas divide the optimizer's work (ZeRO 1)."""
    gathers: Number
    """Times a step that sharded parameters are gathered for a forward pass; each again for backward, if so."""
    gathers_again: Flag
    """Parameters are freed after forward."""
    reductions: Number
    """Times a step that gradients are scattered."""

    # Techniques
    recomputed: Number
    """Share of the forward pass that backward repeats, by layers that are checkpointed whole."""
    selective: Number
    """Share of layers whose cheap operations alone are repeated."""
    adapter: Flag
    """The model is frozen but for small adapters (LoRA): its products have no gradient of the weights."""

    def take(self, chosen: Any) -> Case:
        """The chosen cases of many: an index, a mask or a list of indices."""
        return Case(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def batch(cases: Sequence[Case]) -> Case:
    """Many cases as one, of arrays."""
    import numpy as np

    columns: dict[str, Any] = {}
    for field in fields(Case):
        values = [getattr(case, field.name) for case in cases]
        columns[field.name] = Labels.of(values) if isinstance(values[0], str) else np.array(values)
    return Case(**columns)
