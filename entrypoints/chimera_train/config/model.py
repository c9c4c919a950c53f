"""The model's shape: the recipe's `model` section."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem, divisors


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than the model was first trained on."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def validate(self) -> list[Problem]:
        problems = []
        if self.factor < 1:
            problems.append(Problem("model.rope_scaling.factor", f"{self.factor} is below 1", "null does not scale"))
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                Problem(
                    "model.rope_scaling.low_freq_factor",
                    f"{self.low_freq_factor} is not between 0 and high_freq_factor={self.high_freq_factor}",
                )
            )
        if self.original_max_position_embeddings < 1:
            problems.append(
                Problem(
                    "model.rope_scaling.original_max_position_embeddings",
                    f"{self.original_max_position_embeddings} is not positive",
                )
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or MoE."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the SwiGLU; of one expert where `num_experts` > 0."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; divides `num_heads` (grouped-query attention)."""
    head_dim: int | None = None
    """None: `hidden_size / num_heads`."""
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
    router_aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss (Switch Transformer's form, as Mixtral uses it)."""
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation; the two projections that write to the residual stream use
    this divided by sqrt(2 * num_layers) (GPT-2)."""

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    def validate(self) -> list[Problem]:
        problems = []
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                problems.append(Problem(f"model.{name}", f"{getattr(self, name)} is not positive"))
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
        if self.rope_scaling is not None:
            problems += self.rope_scaling.validate()
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
        if self.head_dim is None and self.hidden_size % self.num_heads:
            problems.append(
                Problem(
                    "model.num_heads",
                    f"{self.num_heads} does not divide model.hidden_size={self.hidden_size}",
                    "set model.head_dim, or a divisor of the hidden size",
                )
            )
        elif self.attention_head_dim % 2:
            problems.append(Problem("model.head_dim", f"{self.attention_head_dim} is odd; rotary positions need pairs"))
        if self.num_experts < 0 or (self.num_experts == 0) != (self.experts_per_token == 0):
            problems.append(
                Problem(
                    "model.experts_per_token",
                    f"num_experts={self.num_experts} with experts_per_token={self.experts_per_token}",
                    "set both, or neither",
                )
            )
        elif self.experts_per_token > self.num_experts:
            problems.append(
                Problem(
                    "model.experts_per_token", f"{self.experts_per_token} exceeds model.num_experts={self.num_experts}"
                )
            )
        for name in ("hidden_size", "intermediate_size"):
            if self.num_experts and getattr(self, name) % 8:
                problems.append(
                    Problem(
                        f"model.{name}",
                        f"{getattr(self, name)} is not a multiple of 8; grouped matrix products of experts want rows "
                        "of 16 bytes",
                    )
                )
        return problems
