"""The model's shape: the recipe's `model` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .latent_attention import LatentAttention
from .mixture import mixture_problems
from .problem import Problem, divisors
from .rope import RopeScaling

MAX_LAYERS = 2_000
"""Twice the deepest transformer that was published (arXiv 2203.00555): all are gone through, one by one."""
RouterScoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped or latent attention, dense or MoE."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the SwiGLU of a dense layer; of one expert too, where `expert_intermediate_size` is null."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; divides `num_heads` (grouped-query attention)."""
    head_dim: int | None = None
    """None: `hidden_size / num_heads`."""
    attention_bias: bool = False
    """The projections of queries, keys and values add a bias (Qwen2)."""
    qk_norm: bool = False
    """Every head of queries and keys is normalised over its channels before it is rotated (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that a query sees, itself included (Mistral 7B v0.1); null: all before it."""
    latent_attention: LatentAttention | None = None
    """Multi-head latent attention (DeepSeek-V3) in place of grouped queries."""
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 8192
    """Longest sequence, in tokens; `train.sequence_length` may not exceed it."""
    tie_embeddings: bool = False
    """The output head is the embedding's matrix."""
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    expert_intermediate_size: int | None = None
    """Width of one expert's SwiGLU. None: `intermediate_size`."""
    num_shared_experts: int = 0
    """Experts that every token goes to beside those it chose, as one SwiGLU of that many times the expert width."""
    num_dense_layers: int = 0
    """The first layers, whose feed-forward is dense, of `intermediate_size`."""
    router_scoring: RouterScoring = "softmax"
    """How the router's outputs become scores: over all experts together, or each for itself (DeepSeek-V3)."""
    normalize_expert_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    routed_scaling_factor: float = 1.0
    """What the weights of a token's experts are multiplied by in the end."""
    num_expert_groups: int = 0
    """Groups of consecutive experts of which a token first chooses `expert_groups_per_token`; 0: no groups."""
    expert_groups_per_token: int = 0
    router_aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss (Switch Transformer's form, as Mixtral uses it)."""
    router_bias_update_speed: float | None = None
    """Balance without a loss (arXiv 2408.15664): a bias per expert, added to the scores for choosing only, moves by
    this much against the load after every step. 0: there is a bias, and it stays as it is. None: no bias."""
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation; the two projections that write to the residual stream use
    this divided by sqrt(2 * num_layers) (GPT-2)."""

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def query_key_dim(self) -> int:
        """Channels of a head of queries and keys."""
        return self.latent_attention.qk_head_dim if self.latent_attention is not None else self.attention_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of a head of values."""
        return self.latent_attention.v_head_dim if self.latent_attention is not None else self.attention_head_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head that are rotated."""
        return self.latent_attention.qk_rope_head_dim if self.latent_attention is not None else self.attention_head_dim

    @property
    def expert_width(self) -> int:
        """Of one expert's SwiGLU."""
        return self.expert_intermediate_size if self.expert_intermediate_size is not None else self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of layer `layer`, which counts from 0, is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def validate(self) -> list[Problem]:
        problems = []
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                problems.append(Problem(f"model.{name}", f"{getattr(self, name)} is not positive"))
        if self.num_layers > MAX_LAYERS:
            problems.append(Problem("model.num_layers", f"{self.num_layers} is out of range", f"at most {MAX_LAYERS}"))
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                problems.append(Problem(f"model.{name}", f"{getattr(self, name)} is not positive"))
        if self.head_dim is not None and self.head_dim < 1:
            problems.append(
                Problem("model.head_dim", f"{self.head_dim} is not positive", "null: hidden_size / num_heads")
            )
        if self.router_aux_loss_coefficient < 0:
            problems.append(
                Problem("model.router_aux_loss_coefficient", f"{self.router_aux_loss_coefficient} is negative")
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(
                Problem("model.sliding_window", f"{self.sliding_window} is not positive", "null: the whole sequence")
            )
        if self.rope_scaling is not None:
            problems += self.rope_scaling.validate()
        if self.latent_attention is not None:
            problems += self.latent_attention.validate() + self._ignored_by_latent_attention()
        if problems:
            return problems
        if self.num_heads % self.num_kv_heads:
            problems.append(
                Problem(
                    "model.num_kv_heads",
                    f"{self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
                    f"use one of {divisors(self.num_heads)}",
                )
            )
        heads_divide = self.head_dim is not None or self.latent_attention is not None
        if not heads_divide and self.hidden_size % self.num_heads:
            problems.append(
                Problem(
                    "model.num_heads",
                    f"{self.num_heads} does not divide model.hidden_size={self.hidden_size}",
                    "set model.head_dim, or a divisor of the hidden size",
                )
            )
        elif self.rope_dim % 2:
            problems.append(Problem("model.head_dim", f"{self.rope_dim} is odd; rotary positions need pairs"))
        return problems + mixture_problems(self)

    def _ignored_by_latent_attention(self) -> list[Problem]:
        ignored = {"head_dim": None, "attention_bias": False, "qk_norm": False, "num_kv_heads": self.num_heads}
        return [
            Problem(
                f"model.{name}",
                f"{getattr(self, name)} would be ignored: latent attention makes the keys and values of all heads from "
                "one latent",
                f"set it to {'null' if value is None else str(value).lower()}",
            )
            for name, value in ignored.items()
            if getattr(self, name) != value
        ]
