"""Multi-head latent attention, as in DeepSeek-V3 (arXiv 2412.19437, §2.1.1).

Shapes, by suffix: B sequences, S tokens a sequence, D hidden size, H heads, R width of a latent, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .attention_core import CausalAttention
from .flash import Segments
from .local import Linear
from .rope import apply_rope_to_neighbours

LATENT_NORM_EPS = 1e-6
"""Of the norms on latents, whatever the model's other norms have: DeepSeek's own modelling code does not set it."""


class MultiHeadLatentAttention(nn.Module):
    """The heads that it computes are those of its weights. The projections to latents belong to all heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        latent = config.latent_attention
        assert latent is not None
        self.latent = latent
        heads, hidden = config.num_heads, config.hidden_size
        self.q_a_proj: Linear | None = None
        self.q_a_norm: nn.RMSNorm | None = None
        if latent.q_lora_rank is not None:
            self.q_a_proj = Linear(hidden, latent.q_lora_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(latent.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(latent.q_lora_rank, heads * latent.qk_head_dim, bias=False)
        else:
            self.q_proj = Linear(hidden, heads * latent.qk_head_dim, bias=False)
        self.kv_a_proj = Linear(hidden, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(latent.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim), bias=False)
        self.o_proj = Linear(heads * latent.v_head_dim, hidden, bias=False)
        scaling = config.rope_scaling
        scale = latent.qk_head_dim**-0.5 * (scaling.softmax_scale if scaling is not None else 1.0)
        self.core = CausalAttention(config.sliding_window, scale)

    def forward(
        self, x_BSD: Tensor, cosine: Tensor, sine: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        latent = self.latent
        if self.q_a_proj is not None and self.q_a_norm is not None:
            q_BSF = self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BSD)))
        else:
            q_BSF = self.q_proj(x_BSD)
        q_BHSC = q_BSF.unflatten(-1, (-1, latent.qk_head_dim)).transpose(1, 2)
        q_plain, q_turned = q_BHSC.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)

        compressed_BSR, k_turned_BSC = self.kv_a_proj(x_BSD).split(
            [latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1
        )
        kv_BSF = self.kv_b_proj(self.kv_a_norm(compressed_BSR))
        kv_BHSC = kv_BSF.unflatten(-1, (-1, latent.qk_nope_head_dim + latent.v_head_dim)).transpose(1, 2)
        k_plain, v_BHSC = kv_BHSC.split([latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)

        k_turned = apply_rope_to_neighbours(k_turned_BSC[:, None], cosine, sine).expand(-1, k_plain.shape[1], -1, -1)
        q_BHSC = torch.cat((q_plain, apply_rope_to_neighbours(q_turned, cosine, sine)), dim=-1)
        k_BHSC = torch.cat((k_plain, k_turned), dim=-1)
        return self.o_proj(self.core(q_BHSC, k_BHSC, v_BHSC, segments).transpose(1, 2).flatten(2))
