"""A decoder-only transformer in the style of Llama 3 and Mixtral, for one device.

It knows nothing of parallelism: `chimera_train.parallel` applies that from outside. It holds no buffers, so a model
made on the meta device is complete once its parameters are.

Shapes, by suffix: B sequences, S tokens a sequence, D hidden size, H heads, K heads of keys and values, C channels of a
head, F width of the SwiGLU, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig, RopeScaling
from ..loss import LossSum, chunked_cross_entropy
from .moe import MixtureOfExperts


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians a position advances each pair of channels, shape [C / 2], float32.

    With `scaling`, Llama 3.1's rule: wavelengths that fit `high_freq_factor` times into the original context keep
    their frequency, those that do not fit `low_freq_factor` times are slowed by `factor`, and those between are
    interpolated (Hugging Face calls this rope_type "llama3").
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rope_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [S, C / 2], float32."""
    frequencies = rope_frequencies(config.attention_head_dim, config.rope_theta, config.rope_scaling, device)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel i of x_BHSC together with channel i + C / 2, in float32; the dtype of `x` comes back."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.attention_head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.grouped = config.num_kv_heads != config.num_heads

    def forward(self, x_BSD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q_BHSC, k_BKSC, v_BKSC = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHSC, k_BKSC = apply_rope(q_BHSC, cosine, sine), apply_rope(k_BKSC, cosine, sine)
        out_BHSC = F.scaled_dot_product_attention(q_BHSC, k_BKSC, v_BKSC, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out_BHSC.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Block(nn.Module):
    """Pre-norm attention and feed-forward (dense or mixture of experts), each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.num_experts else FeedForward(config)

    def forward(self, x_BSD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and the load-balancing loss of a mixture of experts (None where dense)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cosine, sine)
        normed_BSD = self.feed_forward_norm(x_BSD)
        if isinstance(self.feed_forward, MixtureOfExperts):
            out_BSD, balance = self.feed_forward(normed_BSD)
            return x_BSD + out_BSD, balance
        return x_BSD + self.feed_forward(normed_BSD), None


class Head(nn.Module):
    """The output projection, together with the loss over it.

    A sharded weight is whole only inside its module's forward, so the loss that reads it lives there too.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None, chunk_tokens: int) -> Tensor:
        return _logits_or_loss(x_BSD, self.weight, labels_BS, chunk_tokens)


def _logits_or_loss(x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor | None, chunk_tokens: int) -> Tensor:
    if labels_BS is None:
        return F.linear(x_BSD, weight_VD)
    return chunked_cross_entropy(x_BSD, weight_VD, labels_BS, chunk_tokens)


class Decoder(nn.Module):
    """The whole model. Parameter names are those of checkpoints, whatever the parallelism.

    `loss_chunk_tokens` is train.loss_chunk_tokens: tokens whose logits exist at one time; 0 is all of them.
    """

    def __init__(self, config: ModelConfig, *, loss_chunk_tokens: int = 0):
        super().__init__()
        self.config = config
        self.loss_chunk_tokens = loss_chunk_tokens
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else Head(config)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor | LossSum:
        """Logits [B, S, V] without labels; with labels (the token that follows each position, or -100 for none)
        the loss summed over them."""
        cosine, sine = rope_table(self.config, tokens_BS.shape[1], tokens_BS.device)
        x_BSD = self.embedding(tokens_BS)
        balances: list[Tensor] = []
        for block in self.layers:
            x_BSD, balance = block(x_BSD, cosine, sine)
            if balance is not None:
                balances.append(balance)
        x_BSD = self.norm(x_BSD)
        if self.head is not None:
            output = self.head(x_BSD, labels_BS, self.loss_chunk_tokens)
        else:
            output = _logits_or_loss(x_BSD, self.embedding.weight, labels_BS, self.loss_chunk_tokens)
        if labels_BS is None:
            return output
        return LossSum.of(output, labels_BS, balances, self.config.router_aux_loss_coefficient)
