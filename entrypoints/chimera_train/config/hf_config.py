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
from .rope import FIELDS_OF, RopeScaling, RopeType

CONFIG_FILE = "config.json"
_MISSING = object()
_LATENT_KEYS = tuple(f.name for f in dataclasses.fields(LatentAttention))
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_REQUIRED: Mapping[RopeType, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "linear": ("factor",),
}
"""Of rope_scaling: transformers refuses a file without."""
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
_NEUTRAL = {"partial_rotary_factor": 1}
"""Values beside false, 0 and what is empty that change nothing."""
_ZERO_IS_UNSET = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
"""Of rope_scaling: transformers takes 0 for a value that is missing."""
_MEANINGS = {
    "quantization_config": "the weights are quantised; convert them to bfloat16 or float32 first",
    "partial_rotary_factor": "only a part of each head is rotated, which this decoder does not do",
}


def hf_config(model: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Content of config.json, without the ids of special tokens, which the tokenizer knows. `dtype` is the weights'.

    Raises ConfigError where no architecture of Hugging Face computes what `model` does.
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
    """The `model` section for a folder of a model, as plain data; see `model_section`. Values may break its rules."""
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


def read_model(folder: Path) -> ModelConfig:
    """The model of a folder. Raises ConfigError, whose problems' keys begin with the file."""
    section = read_config(folder)
    try:
        model = decode(ModelConfig, section, "model")
        problems = model.validate()
    except ConfigError as error:
        problems = error.problems
    if problems:
        raise ConfigError([Problem(f"{folder / CONFIG_FILE}: {p.key}", p.message, p.fix) for p in problems])
    return model


def model_section(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of `ModelConfig` but its name, from the content of a config.json.

    Raises ConfigError, whose problems' keys are `where` and the key in it, for an architecture that we do not know, and
    every key whose value changes what is computed in a way that we do not follow. A key that we do not know is such a
    key, unless its value switches off what it is of: null, false, 0 and what is empty. A key that is missing has the
    value that transformers takes for it.
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
    # The file's own values may break a rule that the recipe's keep.
    theirs |= {
        "head_dim": file.attention_head_dim if file.num_heads else None,
        "expert_intermediate_size": file.expert_width,
    }
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
        self.defaults: Mapping[str, Any] = {}

    def section(self) -> dict[str, Any]:
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        architecture = BY_NAME.get(name) if isinstance(name, str) else None
        if architecture is None:
            self.refuse("architectures", f"{names!r} is none that we know", f"known: {', '.join(BY_NAME)}")
            return {}
        kind = self.config.get("model_type", architecture.model_type)
        if kind != architecture.model_type:
            self.refuse(
                "model_type",
                f"{kind!r} contradicts architectures={names!r}, whose model_type is {architecture.model_type!r}",
                "correct the one that is wrong: transformers goes by model_type",
            )
            return {}
        self.defaults = architecture.defaults
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
        self._check_never(architecture, section)
        for key, value in self.config.items():
            # What is false, 0 or empty switches off something, which this decoder does not do anyway.
            if key not in self.taken and key not in _WITHOUT_EFFECT and value and value != _NEUTRAL.get(key):
                why = _MEANINGS.get(key, f"{value!r}: we do not know this key of {architecture.name}")
                self.refuse(key, why, "" if key in _MEANINGS else "remove it if it does not change what is computed")
        return section

    def take(self, key: str) -> Any:
        alias = _ALIASES.get(key, key)
        self.taken |= {key, alias}
        value = self.config.get(key, self.config.get(alias, _MISSING))
        return self.defaults[key] if value is _MISSING else value

    def refuse(self, key: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(f"{self.where}: {key}", message, fix))

    def _check_fixed(self, architecture: Architecture) -> None:
        for key, ours in (FIXED | dict(architecture.fixed)).items():
            self.taken.add(key)
            value = self.config.get(key)
            implied = key == "attention_bias" and architecture.implied.get(key, False)
            if value is not None and value != (implied or ours):
                self.refuse(key, f"{value!r} is not what this decoder computes, which is {implied or ours!r}")

    def _check_never(self, architecture: Architecture, section: Mapping[str, Any]) -> None:
        for name, value in architecture.never.items():
            key = architecture.keys.get(name)
            if key is not None and section[name] == value:
                self.refuse(key, f"{value!r} is not what this decoder computes for {architecture.name}")

    def _rope(self, section: Mapping[str, Any]) -> dict[str, Any]:
        self.taken |= set(_ROPE_KEYS)
        # Where a file has both, transformers takes rope_scaling and nothing of the other.
        where = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        parameters = self.config.get(where) or {}
        if not isinstance(parameters, Mapping) or any(isinstance(v, Mapping) for v in parameters.values()):
            self.refuse(where, "layers of different positions are none that this decoder computes")
            return {}
        theta = parameters.get("rope_theta", self.config.get("rope_theta", self.defaults["rope_theta"]))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        found: dict[str, Any] = {"rope_theta": theta}
        if kind == "default":
            return found
        if not isinstance(kind, str) or kind not in FIELDS_OF:
            self.refuse(f"{where}.rope_type", f"{kind!r} is not one of default, {', '.join(FIELDS_OF)}")
            return found
        return found | self._scaling(kind, where, parameters, section["max_position_embeddings"])

    def _scaling(self, kind: RopeType, where: str, parameters: Mapping[str, Any], context: Any) -> dict[str, Any]:
        known = ("factor", *FIELDS_OF[kind])
        values = {
            key: value
            for key, value in parameters.items()
            if key not in ("type", "rope_type", "rope_theta")
            and value is not None
            and (value or (key in known and key not in _ZERO_IS_UNSET))
            and value != _NEUTRAL.get(key)
        }
        if "original_max_position_embeddings" in known:
            original = values.setdefault("original_max_position_embeddings", context)
            # Null is what transformers computes it for; without the key it refuses the file.
            if kind == "yarn" and "factor" in parameters and _are_counts(original, context):
                values.setdefault("factor", context / original)
        for key in values:
            if key not in known:
                self.refuse(f"{where}.{key}", _MEANINGS.get(key, f"we do not know this key of {kind}"))
        for key in _REQUIRED[kind]:
            if key not in values:
                self.refuse(f"{where}.{key}", "is missing")
        if all(key in _SCALING_FIELDS for key in values):
            return {"rope_scaling": {"type": kind} | values}
        return {}

    def _window(self, architecture: Architecture, section: Mapping[str, Any]) -> Any:
        if architecture.window == "key":
            return self.take("sliding_window")
        self.taken |= set(_WINDOW_KEYS)
        kinds = self.config.get("layer_types")
        if kinds is not None and not (isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds)):
            self.refuse("layer_types", f"{kinds!r} is no list of {', '.join(_LAYER_TYPES)}")
            return None
        window = self.take("sliding_window") if self.take("use_sliding_window") else None
        if window is None and kinds and "sliding_attention" in kinds:
            self.refuse("layer_types", "has windows, and use_sliding_window=false or sliding_window=null has none")
        if window is None or not architecture.window_layers:
            return window
        layers, first = section["num_layers"], self.take("max_window_layers")
        if not isinstance(layers, int) or not isinstance(first, int):
            self.refuse("max_window_layers", f"{first!r} of num_hidden_layers={layers!r} is no number of layers")
            return None
        kinds = kinds or [_LAYER_TYPES[layer >= first] for layer in range(layers)]
        if set(kinds) == {"full_attention"}:
            return None
        if set(kinds) != {"sliding_attention"}:
            self.refuse("use_sliding_window", "only some layers have a window: this decoder has it in all or in none")
        return window

    def _dense_layers(self, layers: Any) -> int:
        layers = [] if layers is None else layers
        if not isinstance(layers, list) or layers != list(range(len(layers))):
            self.refuse("mlp_only_layers", f"{layers!r} are not the first layers, the only ones that may be dense here")
            return 0
        return len(layers)

    def _deepseek(self, section: Mapping[str, Any]) -> dict[str, Any]:
        # What transformers writes beside them follows from them.
        self.taken |= {"head_dim", "qk_head_dim"}
        found: dict[str, Any] = {"latent_attention": {key: self.take(key) for key in _LATENT_KEYS}}
        if section["num_expert_groups"] == 1:
            found |= {"num_expert_groups": 0, "expert_groups_per_token": 0}
        # The published weights end with the bias at rest (arXiv 2412.19437, §4.2); training anew may move it.
        return found | {"router_bias_update_speed": 0.0}


def _are_counts(*values: Any) -> bool:
    return all(isinstance(value, int) and value > 0 for value in values)


_SCALING_FIELDS = frozenset(f.name for f in dataclasses.fields(RopeScaling))
