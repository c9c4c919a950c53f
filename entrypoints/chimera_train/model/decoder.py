"""A decoder-only transformer for one device: Llama, Mistral, Qwen, Mixtral and DeepSeek-V3, by configuration.

It knows nothing of parallelism: `chimera_train.parallel` applies that from outside. Its only buffers are the biases of
routers, so a model made on the meta device is complete once these and its parameters are filled.

Shapes, by suffix: B sequences, S tokens a sequence, D hidden size, F width of the SwiGLU, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..config.stages import Stage, whole
from ..loss import IGNORE_INDEX, LossSum, chunked_cross_entropy, whole_vocabulary
from .attention import Attention
from .feed_forward import FeedForward
from .flash import Segments
from .latent_attention import MultiHeadLatentAttention
from .local import local, sharing_group
from .moe import MixtureOfExperts
from .rope import rope_table
from .sequence import Documents, WholeSequence


class Block(nn.Module):
    """Pre-norm attention and feed-forward (dense or mixture of experts), each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = MultiHeadLatentAttention(config) if config.latent_attention is not None else Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = (
            MixtureOfExperts(config)
            if config.has_experts(layer)
            else FeedForward(config.hidden_size, config.intermediate_size)
        )

    def forward(
        self,
        x_BSD: Tensor,
        cosine: Tensor,
        sine: Tensor,
        balance_weight: Tensor | None,
        segments: tuple[Segments, ...] | None = None,
    ) -> Tensor:
        """The residual stream. `balance_weight`: scalar, weight of this layer's load-balancing loss; None: no such loss
        (dense, or no training). `segments`: the documents in which attention stays; None: it crosses them."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cosine, sine, segments)
        normed_BSD = self.feed_forward_norm(x_BSD)
        if isinstance(self.feed_forward, MixtureOfExperts):
            return x_BSD + self.feed_forward(normed_BSD, balance_weight)
        return x_BSD + self.feed_forward(normed_BSD)


class Embedding(nn.Module):
    """The token table."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.embedding(tokens_BS, local(self.weight))


class Head(nn.Module):
    """The output projection, together with the loss over it.

    A sharded weight is whole only inside its module's forward, so the loss that reads it lives there too.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None, chunk_tokens: int, z_loss: float) -> Tensor | LossSum:
        return _logits_or_loss(x_BSD, self.weight, labels_BS, chunk_tokens, z_loss)


def _logits_or_loss(
    x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor | None, chunk_tokens: int, z_loss: float
) -> Tensor | LossSum:
    group = sharing_group(weight_VD)
    if labels_BS is not None:
        return chunked_cross_entropy(x_BSD, local(weight_VD), labels_BS, chunk_tokens, group, z_loss)
    logits_BSV = F.linear(x_BSD, local(weight_VD))
    return logits_BSV if group is None else whole_vocabulary(logits_BSV, group)


class Decoder(nn.Module):
    """The whole model, or one stage of it. Parameter names are those of checkpoints, whatever the parallelism.

    `loss_chunk_tokens` is train.loss_chunk_tokens: tokens whose logits exist at one time; 0 is all of them. `z_loss` is
    train.z_loss.
    """

    def __init__(
        self, config: ModelConfig, *, stage: Stage | None = None, loss_chunk_tokens: int = 0, z_loss: float = 0.0
    ):
        super().__init__()
        stage = stage or whole(config)
        self.config = config
        self.stage = stage
        self.loss_chunk_tokens = loss_chunk_tokens
        self.z_loss = z_loss
        self.sequence = WholeSequence()
        """Which tokens of every sequence this rank has, and so what it is fed."""
        self.sequence_split = 1
        """Ranks over which the hidden states between blocks are split along S; what is not split is the tokens."""
        tied_copy = stage.last and config.tie_embeddings  # a stage of its own has the matrix for the output alone
        self.embedding = Embedding(config) if stage.first or tied_copy else None
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in stage.layers})
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if stage.last else None
        self.head = Head(config) if stage.last and not config.tie_embeddings else None

    def forward(
        self, x: Tensor, labels_BS: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor | LossSum:
        """The first stage takes tokens [B, S], later ones the hidden states [B, S, D] of the stage before. The last
        gives logits [B, S, V] without labels, and with labels (the token that follows each position, or -100 for none)
        the loss summed over them; earlier ones give hidden states. With `documents`, attention and positions stay
        inside of each."""
        if self.stage.first:
            assert self.embedding is not None
            length, x_BSD = x.shape[1], self.embedding(x)
        else:
            length, x_BSD = x.shape[1] * self.sequence_split, x
        if documents is None:
            positions, segments = self.sequence.positions(length, x.device), None
        else:
            positions, segments = documents.positions_BS[:, None], documents.segments  # the same for all heads
        cosine, sine = rope_table(self.config, positions)
        balance_weight = self._balance_weight(labels_BS)
        for block in self.layers.values():
            x_BSD = block(x_BSD, cosine, sine, balance_weight, segments)
        if not self.stage.last:
            return x_BSD
        assert self.norm is not None
        x_BSD = self.norm(x_BSD)
        if self.head is not None:
            return self.head(x_BSD, labels_BS, self.loss_chunk_tokens, self.z_loss)
        assert self.embedding is not None
        return _logits_or_loss(x_BSD, self.embedding.weight, labels_BS, self.loss_chunk_tokens, self.z_loss)

    def _balance_weight(self, labels_BS: Tensor | None) -> Tensor | None:
        """The load-balancing loss is the mean over the layers with experts, and counts once a valid token, so that it
        survives the division of the gradients by the count of tokens. Ranks that split the hidden states of the same
        tokens have an equal share of its weight."""
        coefficient = self.config.router_aux_loss_coefficient
        if labels_BS is None or not (self.config.num_experts and coefficient):
            return None
        return (labels_BS != IGNORE_INDEX).sum() * (coefficient / self.config.num_expert_layers / self.sequence_split)
