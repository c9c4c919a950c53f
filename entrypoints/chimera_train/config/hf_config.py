"""A model's configuration in Hugging Face's format, config.json, both ways.

Both on-disk forms are read: rope_theta and rope_scaling (transformers 4), and rope_parameters (5). The first is
written, which both versions read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .decode import ConfigError, decode, encode
from .hf_architectures import BY_NAME, COMMON_KEYS, FIXED, Architecture, architecture_of
from .latent_attention import LatentAttention
from .model import ModelConfig
from .problem import Problem
from .rope import FIELDS_OF, RopeScaling

CONFIG_FILE = "config.json"
_MISSING = object()
_COMMON_DEFAULTS: dict[str, Any] = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_LATENT_KEYS = tuple(f.name for f in dataclasses.fields(LatentAttention))
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "ep_size",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "seq_aux",
        "task_specific_params",
        "tf_legacy_loss",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys of token ids, generation, serving and bookkeeping, and those that transformers' own code does not read."""
_OF_TRAINING = frozenset(
    {"name", "initializer_range", "max_position_embeddings", "router_aux_loss_coefficient", "router_bias_update_speed"}
)
"""Fields that may differ from the file's without the weights computing something else."""
_ALIASES = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
"""Key of transformers 4 → what transformers 5 writes instead."""
_MEANINGS = {
    "quantization_config": "the weights are quantised; convert them to bfloat16 or float32 first",
    "partial_rotary_factor": "only a part of each head is rotated, which this decoder does not do",
}


def hf_config(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Content of config.json, without the ids of special tokens, which the tokenizer knows. `dtype` is the weights'.

    Raises ValueError where no architecture of Hugging Face computes what `model` does.
    """
    architecture = architecture_of(model)
    values = encode(model) | {"head_dim": model.attention_head_dim, "expert_intermediate_size": model.expert_width}
    if "num_dense_layers" in architecture.keys and architecture.keys["num_dense_layers"] == "mlp_only_layers":
        values["num_dense_layers"] = list(range(model.num_dense_layers))
    if model.num_expert_groups == 0:
        values |= {"num_expert_groups": 1, "expert_groups_per_token": 1}
    config: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= {key: values[name] for name, key in (COMMON_KEYS | dict(architecture.keys)).items()}
    config |= {key: value for key, value in FIXED.items() if key != "attention_bias" or not model.attention_bias}
    config |= dict(architecture.fixed) | {"rope_theta": model.rope_theta, "torch_dtype": dtype}
    if model.latent_attention is not None:
        config |= encode(model.latent_attention)
    if model.rope_scaling is not None:
        scaling = encode(model.rope_scaling)
        config["rope_scaling"] = {"rope_type": model.rope_scaling.type, "factor": model.rope_scaling.factor}
        config["rope_scaling"] |= {
            name: scaling[name] for name in FIELDS_OF[model.rope_scaling.type] if scaling[name] is not None
        }
    if model.num_experts:
        config["output_router_logits"] = False
    if architecture.window is not None:
        config["sliding_window"] = model.sliding_window
    if architecture.window == "switch" and model.sliding_window is not None:
        config |= {"use_sliding_window": True}
        if architecture.window_layers:
            config |= {"max_window_layers": 0, "layer_types": ["sliding_attention"] * model.num_layers}
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The `model` section for a folder of a model, as plain data; see `model_section`."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise ConfigError([Problem(str(file), f"is no JSON: {error}")]) from None
    if not isinstance(config, dict):
        raise ConfigError([Problem(str(file), "is no JSON object")])
    return model_section(config, str(file)) | {"name": folder.resolve().name}


def model_section(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of `ModelConfig` but its name, from the content of a config.json.

    Raises ConfigError, whose problems' keys are `where` and the key in it, for an architecture that we do not know, a
    key that is missing, and every key whose value changes what is computed in a way that we do not follow. A key that
    we do not know is such a key.
    """
    reader = _Reader(config, where)
    section = reader.section()
    if reader.problems:
        raise ConfigError(reader.problems)
    return section


def differences(section: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """In words, where a `model` section that was read from a file computes something else than `model`."""
    file = decode(ModelConfig, section)
    ours = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig)}
    ours |= {"head_dim": model.attention_head_dim, "expert_intermediate_size": model.expert_width}
    theirs = {f.name: getattr(file, f.name) for f in dataclasses.fields(ModelConfig)}
    theirs |= {"head_dim": file.attention_head_dim, "expert_intermediate_size": file.expert_width}
    return [
        f"model.{name}={ours[name]}, and {theirs[name]} in the file"
        for name in ours
        if name not in _OF_TRAINING and ours[name] != theirs[name]
    ]


class _Reader:
    """Takes keys out of a config.json; what is left in the end is unknown."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config = config
        self.where = where
        self.problems: list[Problem] = []
        self.taken: set[str] = set()
        self.defaults: dict[str, Any] = {}

    def section(self) -> dict[str, Any]:
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        architecture = BY_NAME.get(name) if isinstance(name, str) else None
        if architecture is None:
            self.refuse("architectures", f"{names!r} is none that we know", f"known: {', '.join(BY_NAME)}")
            return {}
        self.defaults = _COMMON_DEFAULTS | dict(architecture.defaults)
        if architecture.model_type == "llama" and "num_attention_heads" in self.config:
            self.defaults["num_key_value_heads"] = self.config["num_attention_heads"]
        section = {field: self.take(key) for field, key in (COMMON_KEYS | dict(architecture.keys)).items()}
        section |= dict(architecture.implied)
        if section["num_kv_heads"] is None:
            section["num_kv_heads"] = section["num_heads"]
        self._check_fixed(architecture)
        section |= self._rope(section)
        if architecture.window is not None:
            section["sliding_window"] = self._window(architecture, section)
        if architecture.keys.get("num_dense_layers") == "mlp_only_layers":
            section["num_dense_layers"] = self._dense_layers(section["num_dense_layers"])
        if "latent_attention" in architecture.never:
            section |= self._deepseek(section)
        for key, value in self.config.items():
            if key not in self.taken and key not in _WITHOUT_EFFECT and value is not None:
                why = _MEANINGS.get(key, f"{value!r}: we do not know this key of {architecture.name}")
                self.refuse(key, why, "" if key in _MEANINGS else "remove it if it does not change what is computed")
        return section

    def take(self, key: str) -> Any:
        alias = _ALIASES.get(key, key)
        self.taken |= {key, alias}
        value = self.config.get(key, self.config.get(alias, self.defaults.get(key, _MISSING)))
        if value is _MISSING:
            self.refuse(key, "is missing")
            return None
        return value

    def refuse(self, key: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(f"{self.where}: {key}", message, fix))

    def _check_fixed(self, architecture: Architecture) -> None:
        for key, ours in (FIXED | dict(architecture.fixed)).items():
            self.taken.add(key)
            value = self.config.get(key)
            implied = key == "attention_bias" and architecture.implied.get(key, False)
            if value is not None and value != (implied or ours):
                self.refuse(key, f"{value!r} is not what this decoder computes, which is {ours!r}")

    def _rope(self, section: Mapping[str, Any]) -> dict[str, Any]:
        self.taken |= set(_ROPE_KEYS)
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping) or any(isinstance(v, Mapping) for v in parameters.values()):
            self.refuse("rope_parameters", "layers of different positions are none that this decoder computes")
            return {}
        theta = parameters.get("rope_theta", self.config.get("rope_theta", self.defaults["rope_theta"]))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        found: dict[str, Any] = {"rope_theta": theta}
        if kind == "default":
            return found
        where = "rope_parameters" if self.config.get("rope_parameters") else "rope_scaling"
        if kind not in FIELDS_OF:
            self.refuse(f"{where}.rope_type", f"{kind!r} is not one of default, {', '.join(FIELDS_OF)}")
            return found
        values = {k: v for k, v in parameters.items() if k not in ("type", "rope_type", "rope_theta") and v is not None}
        context = section["max_position_embeddings"]
        if "original_max_position_embeddings" in FIELDS_OF[kind]:
            original = values.setdefault("original_max_position_embeddings", context)
            if "factor" not in values and isinstance(original, int) and isinstance(context, int):
                values["factor"] = context / original
        if values.get("partial_rotary_factor") == 1:
            del values["partial_rotary_factor"]
        for key in values:
            if key not in ("factor", *FIELDS_OF[kind]):
                self.refuse(f"{where}.{key}", _MEANINGS.get(key, f"we do not know this key of {kind}"))
        if "factor" not in values:
            self.refuse(f"{where}.factor", "is missing")
        if all(key in _SCALING_FIELDS for key in values):
            found["rope_scaling"] = {"type": kind} | values
        return found

    def _window(self, architecture: Architecture, section: Mapping[str, Any]) -> Any:
        self.taken |= set(_WINDOW_KEYS) if architecture.window == "switch" else {"sliding_window"}
        if architecture.window == "key":
            return self.take("sliding_window")
        if not self.config.get("use_sliding_window", False):
            return None
        if not architecture.window_layers:
            return self.config.get("sliding_window", 4096)
        layers = section["num_layers"] if isinstance(section["num_layers"], int) else 0
        first = self.config.get("max_window_layers", 28)
        kinds = self.config.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
        ]
        if set(kinds) == {"full_attention"}:
            return None
        if set(kinds) != {"sliding_attention"}:
            self.refuse("use_sliding_window", "only some layers have a window: this decoder has it in all or in none")
        return self.config.get("sliding_window", 4096)

    def _dense_layers(self, layers: Any) -> int:
        if layers is not None and list(layers) != list(range(len(layers))):
            self.refuse("mlp_only_layers", f"{layers!r} are not the first layers, the only ones that may be dense here")
        return len(layers or [])

    def _deepseek(self, section: Mapping[str, Any]) -> dict[str, Any]:
        self.defaults["q_lora_rank"] = None
        # What transformers writes beside them follows from them.
        self.taken |= {"head_dim", "qk_head_dim"}
        found: dict[str, Any] = {"latent_attention": {key: self.take(key) for key in _LATENT_KEYS}}
        if section["num_expert_groups"] == 1:
            found |= {"num_expert_groups": 0, "expert_groups_per_token": 0}
        # The published weights end with the bias at rest (arXiv 2412.19437, §4.2); training anew may move it.
        return found | {"router_bias_update_speed": 0.0}


_SCALING_FIELDS = frozenset(f.name for f in dataclasses.fields(RopeScaling))
