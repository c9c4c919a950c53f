"""Time of one optimizer step: a roofline for computing, latency and bandwidth for communicating, and what overlaps.

The slowest pipeline stage sets the pace. Every constant is in `data/coefficients.csv`; they were fitted together on
published runs and are an effective set, not properties of the hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chimera_sm.catalog import Instance
from chimera_train.config import (
    BatchPlan,
    MeshLayout,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    flops_per_token,
)
from chimera_train.config.flops import (
    attention_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    expert_parameters,
    seen_twice,
)
from chimera_train.config.schedules import SCHEDULES

from .coefficients import coefficient
from .parameters import stage_parameters
from .types import StepEstimate

BASIS = "roofline with coefficients fitted to published runs"
NOT_PREDICTED = "not predicted on this machine"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step computes and on what."""

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    layout: MeshLayout
    batch: BatchPlan
    instance: Instance

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank, before tensor parallel."""
        return self.batch.micro_batch_size * self.batch.sequence_length / self.layout.context

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision.param_dtype == "bfloat16" else 4

    @property
    def reduce_bytes(self) -> int:
        return 2 if self.precision.reduce_dtype == "bfloat16" else 4

    @property
    def passes(self) -> tuple[float, float]:
        """Forward passes of recomputation in the backward, and backward cost in forward passes."""
        recompute = {"none": 0.0, "selective": 3 * coefficient("selective_recompute"), "full": 1.0}
        return recompute[self.train.activation_checkpointing] / self.train.activation_checkpointing_every, 2.0


def estimate_step(work: Workload) -> StepEstimate:
    """Predict one step. All of it is None where the catalogue knows no peak or bandwidth of the accelerator."""
    per_token = flops_per_token(work.model, work.batch.sequence_length)
    peak, memory = work.instance.bf16_tflops, work.instance.memory_gb_s
    if peak is None or memory is None:
        return unknown_step(per_token, f"the catalogue has no dense bf16 peak of {work.instance.accelerator}")
    if work.precision.param_dtype != "bfloat16" or work.precision.float8 != "none":
        return unknown_step(per_token, "only bf16 is predicted on accelerators")
    if work.train.activation_memory_budget is not None:
        return unknown_step(per_token, "what the compiler computes again for a memory budget is not predicted")
    if work.train.activation_offload:
        return unknown_step(per_token, "the traffic of offloaded activations is not predicted")
    micro_batches = work.batch.accumulation_steps
    layers = work.model.num_layers / work.layout.pipeline  # stages are cut so that they take the same time
    with_experts = layers * work.model.num_expert_layers / work.model.num_layers
    compute = head_compute_s(work, peak)
    compute += with_experts * layer_compute_s(work, peak, experts=True)
    compute += (layers - with_experts) * layer_compute_s(work, peak, experts=False)
    tensor = layers * tensor_parallel_s(work)
    context = layers * context_parallel_s(work)
    expert = with_experts * expert_parallel_s(work)
    p2p = pipeline_p2p_s(work)
    busy = compute + tensor + context + expert
    components = {
        "compute": micro_batches * compute,
        "tensor_parallel": micro_batches * tensor,
        "context_parallel": micro_batches * context,
        "expert_parallel": micro_batches * expert,
        "fully_sharded": fully_sharded_s(work, busy),
        "data_parallel": data_parallel_s(work, busy),
        "pipeline_p2p": micro_batches * p2p,
        "pipeline_bubble": bubble_share(work.layout) * (busy + p2p),
        "optimizer": optimizer_s(work, memory),
    }
    components = {name: seconds for name, seconds in components.items() if seconds > 0}
    total = sum(components.values())
    rate = work.batch.tokens_per_step / total
    world = work.layout.world_size
    return StepEstimate(
        components_s=components,
        total_s=total,
        tokens_per_s=rate,
        tokens_per_s_per_accelerator=rate / world,
        mfu=per_token * rate / world / (peak * 1e12),
        flops_per_token=per_token,
        basis=BASIS,
    )


def unknown_step(per_token: float, basis: str) -> StepEstimate:
    return StepEstimate(
        components_s={},
        total_s=None,
        tokens_per_s=None,
        tokens_per_s_per_accelerator=None,
        mfu=None,
        flops_per_token=per_token,
        basis=basis,
    )


def layer_compute_s(work: Workload, peak_tflops: float, *, experts: bool) -> float:
    """Forward and backward of one layer, with experts or dense, for one micro-batch on one rank."""
    model, tensor, family = work.model, work.layout.tensor, work.instance.family
    width = model.hidden_size / tensor
    efficiency = (
        coefficient("matmul_efficiency", family)
        * work.tokens
        / (work.tokens + coefficient("token_saturation"))
        * width
        / (width + coefficient("hidden_saturation"))
    )
    dense_parameters = attention_parameters(model)
    expert_s = 0.0
    if experts:
        narrow = model.expert_width / tensor
        expert_efficiency = efficiency * narrow / (narrow + coefficient("expert_saturation"))
        active = expert_parameters(model) * (model.experts_per_token + model.num_shared_experts)
        expert_s = 2 * work.tokens * active / tensor / (peak_tflops * 1e12 * expert_efficiency)
    else:
        dense_parameters += dense_mlp_parameters(model)
    matmul_s = 2 * work.tokens * dense_parameters / tensor / (peak_tflops * 1e12 * efficiency) + expert_s
    # Causal kernels skip the half above the diagonal; context parallel balances it between ranks.
    channels = model.num_heads * (model.query_key_dim + model.value_dim) / tensor
    attention_flops = work.tokens * seen_twice(model, work.batch.sequence_length) * channels
    attention_s = attention_flops / (peak_tflops * 1e12 * coefficient("attention_efficiency", family))
    recompute, backward = work.passes
    forward_s = (matmul_s + attention_s) / stack_speed(work)
    return max(forward_s * (1 + backward + recompute), coefficient("layer_floor_s"))


def stack_speed(work: Workload) -> float:
    """Of this trainer's kernels and launches, relative to the stack that the efficiencies were fitted on."""
    eager = 1.0 if work.train.compile else coefficient("eager_speed", work.instance.family)
    return coefficient("stack_speed") * eager


def head_compute_s(work: Workload, peak_tflops: float) -> float:
    """Output head and loss for one micro-batch, on the last stage, which sets the pace of the others."""
    flops = 6 * work.tokens * embedding_parameters(work.model) / work.layout.tensor
    efficiency = coefficient("matmul_efficiency", work.instance.family) * stack_speed(work)
    return flops / (peak_tflops * 1e12 * efficiency)


def tensor_parallel_s(work: Workload) -> float:
    """Exposed part of a layer's all-reduces (or gathers and scatters of sequence parallel) over the host's links."""
    degree = work.layout.tensor
    if degree == 1:
        return 0.0
    size = work.tokens * work.model.hidden_size * work.element_bytes
    recompute, _ = work.passes
    reductions = 4 + (2 if recompute >= 1 else 0)
    seconds = reductions * (
        2 * (degree - 1) / degree * size / link_bytes_s(work.instance) + coefficient("link_latency_s")
    )
    return coefficient("tensor_parallel_exposed") * seconds


def context_parallel_s(work: Workload) -> float:
    """Exposed part of passing keys and values round, and their gradients back."""
    degree = work.layout.context
    if degree == 1:
        return 0.0
    model = work.model
    keys_values = model.num_kv_heads * (model.query_key_dim + model.value_dim) / work.layout.tensor
    size = work.tokens * keys_values * work.element_bytes * (degree - 1)
    spans_hosts = degree * work.layout.tensor > work.layout.workers_per_host
    bandwidth = network_bytes_s(work) if spans_hosts else link_bytes_s(work.instance)
    return coefficient("context_parallel_exposed") * 3 * size / bandwidth


def expert_parallel_s(work: Workload) -> float:
    """Exposed part of dispatching tokens to experts and combining them, forward and backward. A token travels once to
    a host, however many of its experts are there."""
    degree = work.layout.expert
    if degree == 1:
        return 0.0
    local = max(1, work.layout.workers_per_host // work.layout.tensor)
    hosts = max(1, degree // local)
    copies = work.model.experts_per_token if hosts == 1 else min(work.model.experts_per_token, hosts)
    size = work.tokens * work.model.hidden_size * work.element_bytes * copies * (degree - 1) / degree
    bandwidth = link_bytes_s(work.instance) if hosts == 1 else network_bytes_s(work)
    return coefficient("expert_parallel_exposed") * 4 * size / bandwidth


def fully_sharded_s(work: Workload, busy_s: float) -> float:
    """Gathering parameters and scattering gradients beyond what computing hides, all micro-batches of the step.

    Each micro-batch gathers for forward and, resharded, again for backward, and reduces its gradients, unless
    parallel.defer_gradient_sync leaves that to the last; in a pipeline both happen once a step.
    """
    shards, expert_shards = work.layout.shard, work.layout.expert_shard
    if shards == expert_shards == 1:
        return 0.0
    stage = stage_parameters(work.model, work.layout, work.layout.rank_of_stage(work.layout.num_stages - 1))
    gather = collective_s(work, shards, stage.dense * work.element_bytes, stage.layers)
    scatter = collective_s(work, shards, stage.dense * work.reduce_bytes, stage.layers)
    gather += collective_s(work, expert_shards, stage.experts * work.element_bytes, stage.layers)
    scatter += collective_s(work, expert_shards, stage.experts * work.reduce_bytes, stage.layers)
    rounds = 1 if work.layout.pipeline > 1 else work.batch.accumulation_steps
    reductions = 1 if work.parallel.defer_gradient_sync else rounds
    recompute, backward = work.passes
    forward_share = 1 / (1 + backward + recompute)
    hidden = coefficient("fully_sharded_overlap") * busy_s
    gathers_again = work.parallel.frees_after_forward and work.layout.pipeline == 1
    forward = max(0.0, gather - hidden * forward_share)
    again = gather if gathers_again else 0.0
    reducing = max(0.0, scatter + again - hidden * (1 - forward_share))
    not_reducing = max(0.0, again - hidden * (1 - forward_share))
    edges = (gather + scatter) / stage.layers  # nothing hides the first gather and the last scatter
    return rounds * forward + reductions * reducing + (rounds - reductions) * not_reducing + edges


def data_parallel_s(work: Workload, busy_s: float) -> float:
    """All-reduce of the gradient shards between replicas, once a step, behind the last micro-batch."""
    if work.layout.data_parallel == 1:
        return 0.0
    stage = stage_parameters(work.model, work.layout, work.layout.rank_of_stage(work.layout.num_stages - 1))
    size = 2 * stage.stored * work.reduce_bytes
    replicas = work.layout.data_parallel
    seconds = size * (replicas - 1) / replicas / network_bytes_s(work)
    return max(0.0, seconds - coefficient("data_parallel_overlap") * busy_s)


def pipeline_p2p_s(work: Workload) -> float:
    if work.layout.pipeline == 1:
        return 0.0
    size = work.tokens * work.model.hidden_size * work.element_bytes / work.layout.tensor
    return coefficient("pipeline_p2p_exposed") * 2 * size / network_bytes_s(work)


def bubble_share(layout: MeshLayout) -> float:
    """Idle time of a rank of the pipeline, in micro-batches: p - 1, and as many times less as a rank has stages.

    Where backward is split, the gradients of the weights fill two thirds of it, if they take a third of the time of a
    forward and a backward.
    """
    idle = (layout.pipeline - 1) / layout.stages_per_rank
    if layout.schedule == "interleaved_1f1b":
        return coefficient("interleaved_bubble") * idle
    return idle / 3 if SCHEDULES[layout.schedule].splits_backward else idle


def optimizer_s(work: Workload, memory_gb_s: float) -> float:
    """AdamW reads parameter, gradient and two moments in fp32 and writes three of them; clipping reads gradients."""
    stored = stage_parameters(work.model, work.layout, 0).stored
    return stored * (7 + 1) * 4 / (memory_gb_s * 1e9 * coefficient("memory_efficiency"))


def link_bytes_s(instance: Instance) -> float:
    """Effective bandwidth of one accelerator inside its host, bytes a second."""
    link = instance.link_gb_s or 0.0
    kind = "switched" if instance.switched_link else "pcie"
    return link * 1e9 * coefficient("link_efficiency", kind)


def network_bytes_s(work: Workload) -> float:
    """Effective share of the host's network of one worker, bytes a second. Inside one host: the link."""
    if work.layout.hosts == 1:
        return link_bytes_s(work.instance)
    host = work.instance.network_gbps / 8 * 1e9 * coefficient("network_efficiency")
    return host / work.layout.workers_per_host


def collective_s(work: Workload, ranks: int, size_bytes: float, pieces: int) -> float:
    """Gather (or scatter) `size_bytes` over `ranks`, in `pieces`.

    Ranks on one host use its links. Over hosts, the group has the network of its local ranks together (a ring enters
    and leaves a host once), and its links are a second bound.
    """
    if ranks <= 1 or size_bytes == 0:
        return 0.0
    layout = work.layout
    local = min(ranks, max(1, layout.workers_per_host // layout.tensor))
    seconds = size_bytes * (ranks - 1) / ranks / link_bytes_s(work.instance) if local > 1 else 0.0
    latency = coefficient("link_latency_s")
    hosts = ranks // local
    if hosts > 1:
        seconds = max(seconds, size_bytes * (hosts - 1) / hosts / (network_bytes_s(work) * local))
        latency = coefficient("network_latency_s") * math.log2(hosts)
    return seconds + pieces * latency
