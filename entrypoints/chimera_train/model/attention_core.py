"""The core of attention: scores, softmax and the mean of the values. It has no parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Every query sees the keys at its own position and before, at most `window` of them (None: all).

    `scale` multiplies the scores; None: 1 / sqrt(C). Context parallel puts another in its place, which also sees the
    keys that other ranks hold.
    """

    def __init__(self, window: int | None = None, scale: float | None = None):
        super().__init__()
        self.window = window
        self.scale = scale

    def forward(self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor) -> Tensor:
        grouped, length = q_BHSC.shape[1] != k_BKSC.shape[1], q_BHSC.shape[2]
        if self.window is None or length <= self.window:
            return F.scaled_dot_product_attention(
                q_BHSC, k_BKSC, v_BKSC, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        seen_SS = torch.ones(length, length, dtype=torch.bool, device=q_BHSC.device)
        seen_SS = seen_SS.tril().triu(1 - self.window)
        return F.scaled_dot_product_attention(
            q_BHSC, k_BKSC, v_BKSC, attn_mask=seen_SS, scale=self.scale, enable_gqa=grouped
        )
