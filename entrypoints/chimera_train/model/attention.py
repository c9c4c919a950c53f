"""Grouped-query attention with rotary positions.

Shapes, by suffix: B sequences, S tokens a sequence, D hidden size, H heads, K heads of keys and values, C channels of a
head.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..config import ModelConfig
from .attention_core import CausalAttention
from .flash import Segments
from .local import Linear
from .rope import apply_rope


class Attention(nn.Module):
    """The heads that it computes are those of its weights."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.attention_head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.o_proj = Linear(width, config.hidden_size, bias=False)
        self.core = CausalAttention(config.sliding_window)

    def forward(
        self, x_BSD: Tensor, cosine: Tensor, sine: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        q_BSHC, k_BSKC, v_BSKC = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        q_BHSC = apply_rope(q_BSHC.transpose(1, 2), cosine, sine)
        k_BKSC = apply_rope(k_BSKC.transpose(1, 2), cosine, sine)
        return self.o_proj(self.core(q_BHSC, k_BKSC, v_BSKC.transpose(1, 2), segments).transpose(1, 2).flatten(2))
