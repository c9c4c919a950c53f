"""What Hugging Face's architectures compute, in the words of `ModelConfig`, and what their config.json calls it.

Read off the configuration and modelling files of transformers 4.57 and 5.x.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .decode import ConfigError
from .hf_defaults import DEFAULTS
from .model import ModelConfig
from .problem import Problem

COMMON_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
"""Our field → the key that all of them have for it."""
FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False, "attention_bias": False}
"""Keys that change what is computed, with the one value that we compute."""
_NOT_COMPUTED = frozenset({"name", "router_aux_loss_coefficient"})
"""Fields that config.json may lack: the weights compute the same without."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of Hugging Face's model classes."""

    name: str
    """As in `architectures`."""
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Our field → key, beyond the common ones."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that it has without saying so."""
    never: Mapping[str, Any] = field(default_factory=dict)
    """Our fields with a value that it cannot have."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """As `FIXED`, of this one alone; a key may be missing."""
    window: str | None = None
    """How it says model.sliding_window: `key` (sliding_window alone), `switch` (use_sliding_window too), or not."""
    window_layers: bool = False
    """Of `switch`: layer_types or max_window_layers say which layers have it."""
    expert_tensors: tuple[str, str, str, str] | None = None
    """Module of the mixture of experts in a layer, and the names of an expert's gate, up and down projections."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Keys that a config.json may lack, with what transformers then takes."""
        return DEFAULTS[self.model_type]

    def lacks(self, model: ModelConfig) -> list[str]:
        """Fields of `model` whose values it cannot express."""
        says = {*COMMON_KEYS, *self.keys, *self.never, *_NOT_COMPUTED, "rope_theta", "rope_scaling"}
        if self.window is not None:
            says.add("sliding_window")
        missing = []
        for f in fields(ModelConfig):  # not of its subclass, whose fields say nothing of what is computed
            value = getattr(model, f.name)
            if f.name in says:
                wrong = f.name in self.never and value == self.never[f.name]
            else:
                wrong = value != self.implied.get(f.name, f.default)
            if wrong:
                missing.append(f.name)
        return missing


_LLAMA_EXPERT = ("gate_proj", "up_proj", "down_proj")
_ROUTING = {"experts_per_token": "num_experts_per_tok"}

ARCHITECTURES = (
    Architecture(name="LlamaForCausalLM", model_type="llama", keys={"head_dim": "head_dim"}),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        keys={"head_dim": "head_dim"},
        window="key",
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        keys={"head_dim": "head_dim"},
        implied={"attention_bias": True},
        window="switch",
        window_layers=True,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        keys={"head_dim": "head_dim"},
        implied={"qk_norm": True},
        window="switch",
        window_layers=True,
    ),
    Architecture(
        name="MixtralForCausalLM",
        model_type="mixtral",
        keys={
            "head_dim": "head_dim",
            "num_experts": "num_local_experts",
            "router_aux_loss_coefficient": "router_aux_loss_coef",
            **_ROUTING,
        },
        window="key",
        fixed={"router_jitter_noise": 0.0},
        expert_tensors=("block_sparse_moe", "w1", "w3", "w2"),
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={
            "head_dim": "head_dim",
            "num_experts": "num_experts",
            "expert_intermediate_size": "moe_intermediate_size",
            "normalize_expert_weights": "norm_topk_prob",
            "num_dense_layers": "mlp_only_layers",
            "router_aux_loss_coefficient": "router_aux_loss_coef",
            **_ROUTING,
        },
        implied={"qk_norm": True},
        window="switch",
        fixed={"decoder_sparse_step": 1},
        expert_tensors=("mlp", *_LLAMA_EXPERT),
    ),
    Architecture(
        name="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        keys={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "expert_intermediate_size": "moe_intermediate_size",
            "normalize_expert_weights": "norm_topk_prob",
            "routed_scaling_factor": "routed_scaling_factor",
            "num_dense_layers": "first_k_dense_replace",
            "num_expert_groups": "n_group",
            "expert_groups_per_token": "topk_group",
            **_ROUTING,
        },
        implied={"router_scoring": "sigmoid"},
        never={"latent_attention": None, "num_shared_experts": 0, "router_bias_update_speed": None},
        fixed={
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        expert_tensors=("mlp", *_LLAMA_EXPERT),
    ),
)
"""Tried in this order for a model: the first that lacks nothing has its name in an export."""
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@functools.cache
def architecture_of(model: ModelConfig) -> Architecture:
    """The first that computes what `model` does. Raises ConfigError, which says what the nearest lacks."""
    nearest = min(ARCHITECTURES, key=lambda architecture: len(architecture.lacks(model)))
    if lacking := nearest.lacks(model):
        values = ", ".join(f"model.{name}={getattr(model, name)}" for name in lacking)
        message = f"no architecture of Hugging Face computes this model: {nearest.name} cannot have {values}"
        raise ConfigError([Problem("model", message)])
    return nearest
