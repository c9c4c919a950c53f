"""Time of one optimizer step: a roofline for computing, latency and bandwidth for communicating, and what overlaps.

The slowest pipeline stage sets the pace. Bandwidths, peaks and degrees are the case's; every other constant is one of
`effective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .arrays import Number, both, either, exp, is_label, log2, maximum, minimum, where
from .case import Case
from .effective import Effective

TERA, GIGA = 1e12, 1e9
BYTES = 2
"""Of an element that is computed with or sent."""
REFERENCE_MONTH = 48.0
"""January 2026: the software that speeds are of where a release is not known."""


@dataclass(frozen=True)
class StepTime:
    components: Mapping[str, Number]
    """Seconds of a step, by what they are spent on; together the whole step."""

    @property
    def total(self) -> Number:
        return sum(self.components.values())


def step_time(case: Case, p: Effective) -> StepTime:
    """Of every case; arrays where the case has arrays."""
    return _Model(case, p).step()


class _Model:
    """One evaluation: what several components read is computed once."""

    def __init__(self, case: Case, p: Effective):
        self.case, self.p = case, p
        self.tokens = case.micro_batch * case.sequence / case.context
        self.has_experts = case.num_experts > 0
        self.layers = case.layers / case.pipeline
        self.expert_layers = case.expert_layers / case.pipeline
        self.bandwidth = case.memory_gb_s * GIGA
        self.link = case.link_gb_s * GIGA * where(case.switched_link, p("link"), p("link", "pcie"))
        self.network = case.network_gb_s * GIGA * p("network")
        backward = where(case.adapter, p("adapter_backward"), 2.0)
        repeated = case.recomputed * p("full_recompute") + case.selective * p("selective_recompute")
        self.passes = 1 + backward + repeated
        self.trained = where(case.adapter, 0.01, 1.0)
        self.speed = self._speed()

    def _speed(self) -> Number:
        """Of the framework, relative to Megatron-Core of the reference month."""
        case, p = self.case, self.p
        months = case.released - REFERENCE_MONTH
        months = where(months == months, months, 0.0)  # NaN: not known
        growth = where(self.has_experts, p("month", "expert"), 0.0)
        growth = growth + where(is_label(case.family, "blackwell"), p("month", "blackwell"), 0.0)
        return p("stack", case.stack) * exp(growth * months)

    def step(self) -> StepTime:
        case, p = self.case, self.p
        dense = self.layers - self.expert_layers
        parts = {
            "products": dense * self.dense_products() + self.expert_layers * self.attention_products(),
            "attention": self.layers * self.attention(),
            "pointwise": self.layers * self.pointwise(),
            "experts": self.expert_layers * self.experts(),
        }
        parts = {name: seconds * self.passes / self.speed for name, seconds in parts.items()}
        floor = self.layers * p("layer_floor_s", case.stack) * self.passes / 3
        parts["launches"] = maximum(0.0, floor - sum(parts.values())) + p("micro_batch_s")
        computing = sum(parts.values())
        parts["tensor_parallel"] = self.layers * self.tensor_parallel()
        parts["context_parallel"] = self.layers * self.context_parallel()
        parts["expert_parallel"] = self.expert_layers * self.expert_parallel()
        busy = computing + parts["tensor_parallel"] + parts["context_parallel"] + parts["expert_parallel"]
        parts["head"] = self.head()
        parts["pipeline_p2p"] = self.pipeline_p2p()
        components = {name: case.micro_batches * seconds for name, seconds in parts.items()}
        bubble = where(case.stages_per_rank > 1, p("bubble"), p("bubble_plain"))
        components["pipeline_bubble"] = bubble * case.idle_micro_batches * (busy + parts["pipeline_p2p"])
        components["fully_sharded"] = self.fully_sharded(busy)
        components["data_parallel"] = self.data_parallel(busy)
        components["optimizer"] = self.optimizer()
        components["launches"] = components["launches"] + p("step_s")
        hosts = maximum(1.0, case.world / case.per_host)
        slowed = exp(p("scale") * log2(hosts))
        return StepTime({name: seconds * slowed for name, seconds in components.items()})

    # Computing: forward, of one layer and micro-batch on one rank.

    def product_rate(self) -> Number:
        """FLOPs a second of a layer's matrix products."""
        case, p = self.case, self.p
        width = case.hidden / case.tensor
        saturated = self.tokens / (self.tokens + p("token_saturation")) * width / (width + p("width_saturation"))
        inner = where(case.mlp_width > 0, case.mlp_width, case.hidden) / case.tensor
        misaligned = either(width % 64 != 0, inner % 64 != 0)
        aligned = 1 - where(misaligned, p("misaligned"), 0.0)
        return self.peak() * saturated * aligned * p("precision_speed", case.precision)

    def peak(self) -> Number:
        return self.case.peak_tflops * TERA * self.p("matmul", self.case.family)

    def attention_products(self) -> Number:
        return 2 * self.tokens * self.case.attention_parameters / self.case.tensor / self.product_rate()

    def dense_products(self) -> Number:
        mlp = 2 * self.tokens * self.case.mlp_parameters / self.case.tensor / self.product_rate()
        return self.attention_products() + mlp

    def attention(self) -> Number:
        """Scores, softmax and the mean of the values. Causal kernels skip the half above the diagonal; those that keep
        their scores do not, and read and write them."""
        case, p = self.case, self.p
        flops = self.tokens * case.attended * (case.query_width + case.value_width) / case.tensor
        narrow = 1 + p("attention_narrow") / case.head_width
        flash = flops * narrow / (case.peak_tflops * TERA * p("attention", case.family))
        scores = self.tokens * case.sequence * case.heads / case.tensor
        kept = scores * p("score_traffic") / self.bandwidth + 2 * flops / self.peak()
        return where(case.flash, flash, kept)

    def pointwise(self) -> Number:
        """What reads and writes memory between products: over the residual stream, the heads and the feed-forward."""
        case, p = self.case, self.p
        inner = where(self.has_experts, case.experts_per_token * case.expert_width, case.mlp_width)
        channels = (case.hidden + (case.query_width + inner) / 2) / case.tensor
        uncompiled = both(is_label(case.stack, "fsdp"), where(case.compiled, False, True))
        passes = p("pointwise") * where(uncompiled, p("eager_pointwise"), 1.0)
        cast = where(is_label(case.precision, "bf16"), 0.0, p("cast_traffic"))
        return self.tokens * channels * (passes + cast) / self.bandwidth

    def experts(self) -> Number:
        """Routed and shared experts, and moving tokens to them and back on the rank."""
        case, p = self.case, self.p
        rows = self.tokens * case.experts_per_token * case.expert / maximum(1.0, case.num_experts)
        saturated = rows / (rows + p("expert_token_saturation"))
        saturated = saturated * case.expert_width / (case.expert_width + p("expert_width_saturation"))
        rate = self.peak() * p("precision_speed", case.precision) * maximum(saturated, 1e-9)
        flops = 2 * self.tokens * case.expert_parameters / case.tensor
        products = flops * case.experts_per_token / rate + flops * case.shared_experts / self.product_rate()
        moved = self.tokens * case.experts_per_token * case.hidden * BYTES / case.tensor
        launches = p("expert_launch_s", case.stack) * case.num_experts / case.expert
        other = p("expert_traffic") * moved / self.bandwidth + p("expert_layer_s") + launches
        return products + other

    def head(self) -> Number:
        """Output head and loss, forward and backward. In a pipeline, the share that the other stages wait for."""
        case, p = self.case, self.p
        passes = where(case.adapter, 2.0, 3.0)
        flops = 2 * passes * self.tokens * case.hidden * case.vocabulary / case.tensor
        seconds = p("head") * flops / (self.peak() * self.speed)
        return seconds * where(case.pipeline > 1, p("head_imbalance"), 1.0)

    # Communicating, of one layer and micro-batch.

    def tensor_parallel(self) -> Number:
        """Exposed part of four all-reduces (or gathers and scatters), six where the forward pass is repeated."""
        case, p = self.case, self.p
        size = self.tokens * case.hidden * BYTES
        wire = where(case.tensor > case.link_domain, self.network, self.link)
        reductions = 4 + 2 * case.recomputed
        each = 2 * (case.tensor - 1) / case.tensor * size / wire * p("tensor_exposed", case.stack)
        return where(case.tensor > 1, reductions * (each + p("tensor_latency_s")), 0.0)

    def context_parallel(self) -> Number:
        """Exposed part of passing keys and values round, and their gradients back."""
        case, p = self.case, self.p
        size = self.tokens * case.key_value_width / case.tensor * BYTES * (case.context - 1)
        wire = where(case.tensor * case.context > case.link_domain, self.network, self.link)
        return p("context_exposed") * 3 * size / wire

    def expert_parallel(self) -> Number:
        """Exposed part of dispatching tokens to experts and combining them, forward and backward. A token travels once
        to a host, however many of its experts are there."""
        case, p = self.case, self.p
        domains = maximum(1.0, case.expert * case.tensor / case.link_domain)
        far = domains > 1
        copies = where(far, minimum(case.experts_per_token, domains), case.experts_per_token)
        size = self.tokens * case.hidden * BYTES / case.tensor * copies * (case.expert - 1) / case.expert
        wire = where(far, self.network, self.link)
        return p("expert_exposed") * 4 * size / wire

    def pipeline_p2p(self) -> Number:
        case, p = self.case, self.p
        size = self.tokens * case.hidden * BYTES / case.tensor
        wire = where(case.pipeline * case.tensor > case.link_domain, self.network, self.link)
        each = p("pipeline_exposed") * 2 * size / wire * case.stages_per_rank
        return where(case.pipeline > 1, each, 0.0)

    # Communicating once a step, or once for each gather.

    def dense_parameters(self) -> Number:
        """Of one rank's stages, after tensor parallel."""
        case = self.case
        dense = self.layers * case.attention_parameters
        dense = dense + (self.layers - self.expert_layers) * case.mlp_parameters
        dense = dense + self.expert_layers * case.shared_experts * case.expert_parameters
        return dense / case.tensor + 2 * case.vocabulary * case.hidden / case.tensor / case.pipeline

    def expert_parameters(self) -> Number:
        case = self.case
        return self.expert_layers * maximum(1.0, case.num_experts / case.expert) * case.expert_parameters

    def all_parameters(self) -> Number:
        return self.dense_parameters() + self.expert_parameters()

    def collective(self, size: Number, ranks: Number) -> Number:
        """Gather or scatter `size` bytes over `ranks`. Over hosts, the group has the network of its local ranks
        together (a ring enters and leaves a host once), and its links are a second bound."""
        local = maximum(1.0, minimum(ranks, self.case.link_domain / self.case.tensor))
        wire = where(ranks > local, minimum(self.link, self.network * local), self.link)
        return size * (ranks - 1) / ranks / wire

    def fully_sharded(self, busy: Number) -> Number:
        """Gathering parameters and scattering gradients, beyond what computing hides."""
        case, p = self.case, self.p
        gather = self.collective(self.all_parameters() * BYTES, case.shard)
        scatter = gather * self.trained
        hidden = p("shard_overlap") * busy
        forward_share = 1 / self.passes
        again = where(case.gathers_again, gather, 0.0)
        forward = maximum(0.0, gather - hidden * forward_share)
        reducing = maximum(0.0, scatter + again - hidden * (1 - forward_share))
        not_reducing = maximum(0.0, again - hidden * (1 - forward_share))
        seconds = case.gathers * (forward + p("shard_exposed") * gather)
        seconds = seconds + case.reductions * reducing + (case.gathers - case.reductions) * not_reducing
        return where(case.shard > 1, seconds, 0.0)

    def data_parallel(self, busy: Number) -> Number:
        """Reducing gradients between replicas, once a step, behind the last micro-batch. Experts have as many fewer
        replicas as there are ranks with other experts."""
        case, p = self.case, self.p
        replicas = case.replicas
        dense = self.collective(2 * BYTES * self.dense_parameters() / case.shard, replicas)
        expert_replicas = maximum(1.0, replicas * case.shard / case.expert)
        experts = self.collective(2 * BYTES * self.expert_parameters(), expert_replicas)
        experts = where(case.shard <= 1, experts, 0.0)
        seconds = (dense + experts) * self.trained
        return maximum(0.0, seconds - p("replica_overlap") * busy) + p("replica_exposed") * seconds

    def optimizer(self) -> Number:
        """Reading and writing parameters, gradients and moments, by the ranks that share the work."""
        case = self.case
        dense, experts = self.dense_parameters(), self.expert_parameters()
        sharers = where(case.shards_optimizer, case.shard * case.replicas, case.shard)
        expert_sharers = maximum(1.0, sharers / case.expert)
        stored = dense / sharers + experts / expert_sharers
        return stored * self.trained * self.p("optimizer_bytes") / self.bandwidth
