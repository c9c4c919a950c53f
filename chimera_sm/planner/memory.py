"""Peak memory of one accelerator of the most loaded rank, component by component, in closed form.

It counts what the trainer does: FSDP2 with master weights, gradients and the optimizer's states (16 bytes a stored
parameter with AdamW in float32), layers gathered in the compute dtype, attention without a score matrix, a loss
computed in chunks with its gradients, and 1F1B's micro-batches in flight. With tensor parallel, the residual stream is
taken to be split over the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from chimera_train.config import (
    BatchPlan,
    MeshLayout,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from chimera_train.config.flops import embedding_parameters
from chimera_train.config.optim import QUANTISATION_BLOCK

from .coefficients import coefficient
from .parameters import StageParameters, stage_parameters
from .types import MemoryEstimate

GIB = 2**30
STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / QUANTISATION_BLOCK}
"""Of one state of a matrix; of 8 bits with a float32 scale a block."""


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What decides memory: a recipe's sections and its layout."""

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    optim: OptimConfig
    precision: PrecisionConfig
    layout: MeshLayout
    batch: BatchPlan
    overhead_gib: float
    """Of the runtime itself: device context, communication buffers, workspaces."""

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision.param_dtype == "bfloat16" else 4

    @property
    def master_bytes(self) -> int:
        """Of a stored parameter, and as much again of its gradient."""
        return 4 if self.precision.master_weights else self.element_bytes

    @property
    def tokens(self) -> float:
        return self.batch.micro_batch_size * self.batch.sequence_length / self.layout.context

    @property
    def gradients_stay_whole(self) -> bool:
        """Reduced once, after the last micro-batch: asked for, or by the schedule of a pipeline."""
        deferred = self.parallel.defer_gradient_sync and self.batch.accumulation_steps > 1
        return deferred or self.layout.pipeline > 1


def estimate_memory(case: Occupancy, capacity_gib: float | None) -> MemoryEstimate:
    """The peak over the ranks of a pipeline; `rank` is the first at the fullest place in it."""
    ranks = [stage_memory_gib(case, rank) for rank in range(case.layout.pipeline)]
    fullest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].values()))
    components = ranks[fullest]
    total = sum(components.values())
    return MemoryEstimate(
        rank=fullest * (case.layout.world_size // case.layout.pipeline),
        components_gib=components,
        total_gib=total,
        capacity_gib=capacity_gib,
        fits=None if capacity_gib is None else total <= coefficient("usable_memory") * capacity_gib,
    )


def stage_memory_gib(case: Occupancy, rank: int) -> dict[str, float]:
    """Of the stages of a rank, given by its coordinate on the pipeline axis."""
    held = stage_parameters(case.model, case.layout, rank)
    last = rank == case.layout.rank_of_stage(case.layout.num_stages - 1)
    parts = {
        "parameters": case.master_bytes * held.stored,
        "gradients": gradient_bytes(case, held),
        "optimizer": optimizer_bytes(case, held),
        "gathered_parameters": gathered_bytes(case, held),
        "activations": activation_bytes(case, rank, held.layers),
        "logits": logits_bytes(case) if last else 0.0,
    }
    gib = {name: size / GIB for name, size in parts.items()}
    gib["overhead"] = case.overhead_gib + coefficient("fragmentation") * sum(gib.values())
    return gib


def gradient_bytes(case: Occupancy, held: StageParameters) -> float:
    """Shards, and what is whole before it is reduced: one layer in both dtypes, or a stage."""
    reduce_bytes = 2 if case.precision.reduce_dtype == "bfloat16" else 4
    if case.gradients_stay_whole:
        whole = held.gathered * reduce_bytes
    else:
        whole = held.largest_unit * (case.element_bytes + reduce_bytes)
    return case.master_bytes * held.stored + whole


def optimizer_bytes(case: Occupancy, held: StageParameters) -> float:
    """States on the accelerator: two a parameter with AdamW, which Muon leaves embedding and head to, or one."""
    if case.optim.offload:
        return 0.0
    twice = {"adamw": held.stored, "muon": held.stored_tables, "lion": 0.0}[case.optim.name]
    return STATE_BYTES[case.optim.state_dtype] * (held.stored + twice)


def gathered_bytes(case: Occupancy, held: StageParameters) -> float:
    """The layer at work and the one fetched ahead; all of them where they are not resharded after forward. A tied
    matrix stays whole between its two uses."""
    if case.layout.pipeline > 1 or not case.parallel.frees_after_forward:
        return held.gathered * case.element_bytes
    tied = embedding_parameters(case.model) / case.layout.tensor if case.model.tie_embeddings else 0.0
    return min(2 * held.largest_unit + tied, held.gathered) * case.element_bytes


def activation_bytes(case: Occupancy, rank: int, layers: int) -> float:
    """Kept for backward by every micro-batch in flight, and the working set of the layer whose backward runs."""
    train, whole, least = case.train, whole_layer_bytes_per_token(case), residual_width(case) * case.element_bytes
    kept = {"none": whole, "selective": selective_bytes_per_token(case), "full": least}[train.activation_checkpointing]
    kept += (whole - kept) * (1 - 1 / train.activation_checkpointing_every)
    if train.activation_memory_budget is not None:
        kept = max(least, train.activation_memory_budget * whole)
    if train.activation_offload:
        kept *= min(1.0, 2 / (layers * in_flight(case, rank)))  # of the block at work, and of the one fetched ahead
    working = coefficient("working_set_layers") * whole_layer_bytes_per_token(case)
    return case.tokens * (kept * layers * in_flight(case, rank) + working)


def residual_width(case: Occupancy) -> float:
    return case.model.hidden_size / case.layout.tensor


def _widths(case: Occupancy) -> tuple[float, float, float, float]:
    """Per rank: query heads, key (or value) heads, SwiGLU (of all experts of a token; dense layers before those with
    experts count as if they had them), heads. Heads of latent attention, whose values are narrower than its keys, at
    their mean."""
    model, tensor = case.model, case.layout.tensor
    head_dim = (model.query_key_dim + model.value_dim) / 2
    mlp = model.intermediate_size / tensor
    if model.num_experts:
        mlp = model.expert_width * (model.experts_per_token + model.num_shared_experts) / tensor
    return model.num_heads * head_dim / tensor, model.num_kv_heads * head_dim / tensor, mlp, model.num_heads / tensor


def whole_layer_bytes_per_token(case: Occupancy) -> float:
    """All that backward reads of one layer: the inputs and outputs of both norms, queries, keys, values, attention's
    output and its float32 normaliser, and the SwiGLU's gate and up. Uncompiled, its silu and product too."""
    query, key, mlp, heads = _widths(case)
    mlp_tensors = 2 if case.train.compile else 4
    routed = residual_width(case) * 2 * case.model.experts_per_token  # tokens copied to experts, and their outputs
    elements = 4 * residual_width(case) + 2 * query + 2 * key + mlp_tensors * mlp + routed
    return case.element_bytes * elements + 4 * heads


def selective_bytes_per_token(case: Occupancy) -> float:
    """The layer's input, attention's output and every second product of matrices: keys, attention's projection and
    the SwiGLU's up in a dense layer; with experts, gate and down of the routed copies."""
    query, key, mlp, heads = _widths(case)
    elements = 2 * residual_width(case) + query + key + mlp
    if case.model.num_experts:
        elements += residual_width(case) * case.model.experts_per_token
    return case.element_bytes * elements + 4 * heads


def in_flight(case: Occupancy, rank: int) -> float:
    """Micro-batches whose activations a rank of the pipeline holds at once, in all of its layers.

    Exact for torch's order of work, but for zbv with fewer than 2 × pipeline - 1 micro-batches, which holds less.
    """
    micro_batches, ranks, schedule = case.batch.accumulation_steps, case.layout.pipeline, case.layout.schedule
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "1f1b":
        return float(min(micro_batches, ranks - rank))
    if schedule == "interleaved_1f1b":
        per_rank = case.layout.stages_per_rank
        return min(micro_batches, ((per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1) / per_rank)
    return ranks + (0.5 if schedule == "dualpipev" else 0.0)


def logits_bytes(case: Occupancy) -> float:
    """Logits of one chunk (compute dtype, float32, gradient in compute dtype) and the head's gradient, whole, in
    float32 and in the compute dtype."""
    tokens = min(case.tokens, case.train.loss_chunk_tokens or case.tokens)
    vocabulary = case.model.vocab_size / case.layout.tensor
    head = embedding_parameters(case.model) / case.layout.tensor
    return tokens * vocabulary * (2 * case.element_bytes + 4) + head * (4 + case.element_bytes)
