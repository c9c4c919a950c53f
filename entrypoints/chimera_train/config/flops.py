"""Parameters and FLOPs of a model in closed form: one count for the planner and for the trainer's MFU."""

from __future__ import annotations

from .model import ModelConfig


def attention_parameters(model: ModelConfig) -> int:
    """One layer's attention: projections, biases, and the norms inside of it."""
    whole = unsplit_attention_parameters(model)
    hidden, output = model.hidden_size, model.hidden_size * model.num_heads * model.value_dim
    if (latent := model.latent_attention) is not None:
        queries = (latent.q_lora_rank or hidden) * model.num_heads * latent.qk_head_dim
        keys_values = latent.kv_lora_rank * model.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return whole + queries + keys_values + output
    width = (model.num_heads + 2 * model.num_kv_heads) * model.attention_head_dim
    return whole + (hidden + model.attention_bias) * width + output


def unsplit_attention_parameters(model: ModelConfig) -> int:
    """What of a layer's attention belongs to no head, so that every rank of tensor parallel has it: the norms inside
    of it, and the projections to latents."""
    if (latent := model.latent_attention) is not None:
        keys_values = model.hidden_size * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
        queries = (model.hidden_size + 1) * latent.q_lora_rank if latent.q_lora_rank is not None else 0
        return keys_values + queries
    return 2 * model.attention_head_dim if model.qk_norm else 0


def dense_mlp_parameters(model: ModelConfig) -> int:
    """Gate, up and down projections of a dense layer's SwiGLU."""
    return 3 * model.hidden_size * model.intermediate_size


def expert_parameters(model: ModelConfig) -> int:
    """The same of one expert."""
    return 3 * model.hidden_size * model.expert_width


def layer_parameters(model: ModelConfig, layer: int, *, active: bool = False) -> int:
    """Layer `layer`, which counts from 0, with its two norms. `active`: of a mixture of experts, what one token passes
    through: the router, the shared experts, and those that it chooses."""
    outside = attention_parameters(model) + 2 * model.hidden_size
    if not model.has_experts(layer):
        return outside + dense_mlp_parameters(model)
    router = model.hidden_size * model.num_experts
    routed = model.experts_per_token if active else model.num_experts
    return outside + router + expert_parameters(model) * (routed + model.num_shared_experts)


def embedding_parameters(model: ModelConfig) -> int:
    """The token table; an untied output head is as large again."""
    return model.vocab_size * model.hidden_size


def num_parameters(model: ModelConfig) -> int:
    """Trainable parameters of the whole model; a tied matrix counts once."""
    return _all_layers(model, active=False) + _outside_layers(model)


def num_active_parameters(model: ModelConfig) -> int:
    """Parameters that one token passes through: `experts_per_token` of the experts, and all else."""
    return _all_layers(model, active=True) + _outside_layers(model)


def _all_layers(model: ModelConfig, *, active: bool) -> int:
    return sum(layer_parameters(model, layer, active=active) for layer in range(model.num_layers))


def _outside_layers(model: ModelConfig) -> int:
    matrices = 1 if model.tie_embeddings else 2
    return matrices * embedding_parameters(model) + model.hidden_size


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of forward and backward for one token: 6 N + 6 L H (c_qk + c_v) s, the numerator of MFU.

    N: active parameters without the input embedding, which is a look-up; a tied matrix counts, as the output head.
    L: layers; H: heads, of c_qk channels for queries and keys and c_v for values; s: `sequence_length`. Attention
    counts as if it saw the whole sequence (a causal kernel does half of it), and recomputation of activations earns no
    credit. The convention is PaLM's (arXiv 2204.02311, appendix B: 12 L H c s), N without embeddings as in torchtitan
    and nanochat. With a sliding window, s is likewise twice the tokens that a query sees on average.
    """
    matrix_parameters = num_active_parameters(model)
    if not model.tie_embeddings:
        matrix_parameters -= embedding_parameters(model)
    channels = model.num_heads * (model.query_key_dim + model.value_dim)
    attention = 6 * model.num_layers * channels * seen_twice(model, sequence_length)
    return float(6 * matrix_parameters + attention)


def seen_twice(model: ModelConfig, sequence_length: int) -> float:
    """Twice the tokens that a query sees on average: the sequence, or less of it through a sliding window."""
    window = min(model.sliding_window or sequence_length, sequence_length)
    return window * (2 - window / sequence_length)
