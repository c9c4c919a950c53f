"""The core of attention: scores, softmax and the mean of the values. It has no parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .flash import Segments, flash_attention


class CausalAttention(nn.Module):
    """Every query sees the keys at its own position and before, at most `window` of them (None: all).

    `scale` multiplies the scores; None: 1 / sqrt(C). Context parallel puts another in its place, which also sees the
    keys that other ranks hold.
    """

    def __init__(self, window: int | None = None, scale: float | None = None):
        super().__init__()
        self.window = window
        self.scale = scale

    def forward(
        self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        """`segments`: the documents inside which attention stays, one cut for each piece of a sequence that this rank
        has; None: attention crosses them."""
        if segments is None and (self.window is None or q_BHSC.shape[2] <= self.window):
            grouped = q_BHSC.shape[1] != k_BKSC.shape[1]
            return F.scaled_dot_product_attention(
                q_BHSC, k_BKSC, v_BKSC, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        (whole,) = segments or (None,)
        return flash_attention(q_BHSC, k_BKSC, v_BKSC, whole, window=self.window, scale=self.scale)
