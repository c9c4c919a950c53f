"""Parameters and configuration in Hugging Face's format: LlamaForCausalLM where dense, MixtralForCausalLM with experts.

Imports nothing but torch and the configuration. Rotary positions pair channel i with i + C / 2 in both, so no weight
is permuted; only names differ, and stacked experts are cut apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig

_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "feed_forward.gate_proj.weight": "mlp.gate_proj.weight",
    "feed_forward.up_proj.weight": "mlp.up_proj.weight",
    "feed_forward.down_proj.weight": "mlp.down_proj.weight",
    "feed_forward.router.weight": "block_sparse_moe.gate.weight",
}
_EXPERTS = {
    "feed_forward.experts.gate_proj": "w1",
    "feed_forward.experts.up_proj": "w3",
    "feed_forward.experts.down_proj": "w2",
}


def hf_names(name: str, model: ModelConfig) -> list[str]:
    """Hugging Face's names of one parameter, in the order in which `to_hf` cuts it. Raises KeyError if unknown."""
    if name in _TOP:
        return [_TOP[name]]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest in _EXPERTS:
        return [f"{prefix}block_sparse_moe.experts.{e}.{_EXPERTS[rest]}.weight" for e in range(model.num_experts)]
    return [prefix + _LAYER[rest]]


def to_hf(name: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """One whole parameter under its Hugging Face names; views of `tensor`, which stacked experts share."""
    names = hf_names(name, model)
    return dict(zip(names, tensor.chunk(len(names)), strict=True))


def from_hf(weights: Mapping[str, Tensor], names: list[str], model: ModelConfig) -> dict[str, Tensor]:
    """The parameters `names` of ours out of Hugging Face's `weights`."""
    return {name: torch.cat([weights[part] for part in hf_names(name, model)]) for name in names}


def hf_config(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Content of config.json, without the ids of special tokens, which the tokenizer knows. `dtype` is the weights'."""
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if model.num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if model.num_experts else "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.attention_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.initializer_range,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    if model.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_position_embeddings,
        }
    if model.num_experts:
        config |= {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.router_aux_loss_coefficient,
            "output_router_logits": False,
            "sliding_window": None,
        }
    return config
