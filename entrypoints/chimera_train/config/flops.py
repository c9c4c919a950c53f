"""Parameters and FLOPs of a model in closed form: one count for the planner and for the trainer's MFU."""

from __future__ import annotations

from .model import ModelConfig


def attention_parameters(model: ModelConfig) -> int:
    """Projections of queries, keys, values and output of one layer."""
    query_width = model.num_heads * model.attention_head_dim
    key_value_width = model.num_kv_heads * model.attention_head_dim
    return model.hidden_size * (2 * query_width + 2 * key_value_width)


def mlp_parameters(model: ModelConfig) -> int:
    """Gate, up and down projections of one SwiGLU: the layer's, or one expert's."""
    return 3 * model.hidden_size * model.intermediate_size


def layer_parameters(model: ModelConfig, *, experts: int | None = None) -> int:
    """One layer with its two norms. In a mixture of experts, with its router and `experts` experts (None: all)."""
    dense = attention_parameters(model) + 2 * model.hidden_size
    if model.num_experts == 0:
        return dense + mlp_parameters(model)
    router = model.hidden_size * model.num_experts
    return dense + router + mlp_parameters(model) * (model.num_experts if experts is None else experts)


def embedding_parameters(model: ModelConfig) -> int:
    """The token table; an untied output head is as large again."""
    return model.vocab_size * model.hidden_size


def num_parameters(model: ModelConfig) -> int:
    """Trainable parameters of the whole model; a tied matrix counts once."""
    return model.num_layers * layer_parameters(model) + _outside_layers(model)


def num_active_parameters(model: ModelConfig) -> int:
    """Parameters that one token passes through: `experts_per_token` of the experts, and all else."""
    return model.num_layers * layer_parameters(model, experts=model.experts_per_token) + _outside_layers(model)


def _outside_layers(model: ModelConfig) -> int:
    matrices = 1 if model.tie_embeddings else 2
    return matrices * embedding_parameters(model) + model.hidden_size


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of forward and backward for one token: 6 N + 12 L h s, the numerator of MFU.

    N: active parameters without the input embedding, which is a look-up; a tied matrix counts, as the output head.
    L: layers; h: width of all query heads; s: `sequence_length`. Attention counts as if it saw the whole sequence
    (a causal kernel does half of it), and recomputation of activations earns no credit. The convention is PaLM's
    (arXiv 2204.02311, appendix B), N without embeddings as in torchtitan and nanochat.
    """
    matrix_parameters = num_active_parameters(model)
    if not model.tie_embeddings:
        matrix_parameters -= embedding_parameters(model)
    attention = 12 * model.num_layers * model.num_heads * model.attention_head_dim * sequence_length
    return float(6 * matrix_parameters + attention)
