"""The dense feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .local import Linear


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) of any leading shape: [..., D] to [..., D] through `width` channels."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width, bias=False)
        self.up_proj = Linear(hidden_size, width, bias=False)
        self.down_proj = Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
