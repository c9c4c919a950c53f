"""Widths of multi-head latent attention: the recipe's `model.latent_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Queries, keys and values out of narrow latents that all heads share (DeepSeek-V2, arXiv 2405.04434, §2.1)."""

    q_lora_rank: int | None = None
    """Width of the queries' latent; null: queries are projected from the hidden state."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int
    """Channels of a query and key head without position."""
    qk_rope_head_dim: int
    """Channels with rotary position; those of the keys are one head that all share."""
    v_head_dim: int
    """Channels of a value head."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def validate(self) -> list[Problem]:
        problems = [
            Problem(f"model.latent_attention.{name}", f"{value} is not positive")
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.qk_rope_head_dim % 2:
            problems.append(
                Problem(
                    "model.latent_attention.qk_rope_head_dim",
                    f"{self.qk_rope_head_dim} is odd; rotary positions need pairs",
                )
            )
        return problems
