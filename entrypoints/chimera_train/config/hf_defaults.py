"""What the configuration classes of transformers take for a key that a config.json lacks.

All that is read is here, even sizes: transformers loads a folder that does not give them. Keys that may have one value
only are not, for that value is their default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALL: dict[str, Any] = {
    "head_dim": None,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _ALL
    | {
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    "mistral": _ALL | _MISTRAL | {"sliding_window": 4096},
    "qwen2": _ALL | _QWEN,
    "qwen3": _ALL | _QWEN | {"head_dim": 128},
    "mixtral": _ALL
    | _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": _ALL
    | _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v3": _ALL
    | {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
"""model_type → key → value."""
