"""config.json both ways: published ones give the shipped models, and what we do not compute is refused by its key."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_model_reference import MODELS

from chimera_train.config import ConfigError, ModelConfig, RopeScaling, decode
from chimera_train.config.hf_architectures import BY_NAME, architecture_of
from chimera_train.config.hf_config import differences, hf_config, model_section, read_config, read_model

RECIPES = Path(__file__).parents[2] / "recipes" / "model"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.37.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
PUBLISHED = {
    "llama3_8b": LLAMA,
    "mistral_7b": MISTRAL,
    "qwen2_7b": QWEN2,
    "qwen3_30b_a3b": QWEN3_MOE,
    "deepseek_v3_671b": DEEPSEEK,
}
NOT_OF_THE_FILE = {"router_bias_update_speed", "router_aux_loss_coefficient"}


def model_of(config: dict[str, Any]) -> ModelConfig:
    return decode(ModelConfig, model_section(config, "config.json") | {"name": "m"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_shipped_model(name):
    shipped = decode(ModelConfig, yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))
    found = model_of(PUBLISHED[name])
    assert differences(model_section(PUBLISHED[name], "") | {"name": "m"}, shipped) == []
    same = {"name": shipped.name, **{key: getattr(shipped, key) for key in NOT_OF_THE_FILE}}
    assert replace(found, **same, head_dim=shipped.head_dim) == shipped


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_back(name):
    again = model_of(json.loads(json.dumps(hf_config(MODELS[name]))))
    assert differences(model_section(hf_config(MODELS[name]), "") | {"name": "m"}, MODELS[name]) == []
    assert hf_config(again) == hf_config(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_the_form_of_transformers_5_is_read_too(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(MODELS[name])))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert differences(read_config(tmp_path), MODELS[name]) == []


@pytest.mark.parametrize(
    ("config", "changed", "key", "says"),
    [
        (LLAMA, {"architectures": ["GemmaForCausalLM"]}, "architectures", "known: LlamaForCausalLM"),
        (LLAMA, {"architectures": None}, "architectures", "is none that we know"),
        (LLAMA, {"attention_bias": True}, "attention_bias", "True is not what this decoder computes"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias", "True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout", "0.1"),
        (LLAMA, {"model_type": "mistral"}, "model_type", "'mistral' contradicts architectures=['LlamaForCausalLM']"),
        (LLAMA, {"logit_scale": 2.0}, "logit_scale", "we do not know this key of LlamaForCausalLM"),
        (LLAMA, {"sliding_window": 512}, "sliding_window", "we do not know this key"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "the weights are quantised"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type", "'longrope'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "is missing"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor", "is missing"),
        (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": None}}, "rope_scaling.low_freq_factor",
         "is missing"),
        (QWEN2, {"rope_parameters": {"rope_type": "linear", "factor": 2, "x": 1}}, "rope_parameters.x", "do not know"),
        (QWEN2, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "layers of"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 28}, "layer_types", "has windows"),
        (QWEN2, {"attention_bias": False}, "attention_bias", "False is not what this decoder computes, which is True"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 14}, "use_sliding_window", "only some layers"),
        (QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers", "not the first layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step", "2"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave", "False"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func", "'softmax'"),
        (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts", "0 is not what this decoder computes"),
    ],
)  # fmt: skip
def test_what_we_do_not_compute_is_refused_by_its_key(config, changed, key, says):
    with pytest.raises(ConfigError) as caught:
        model_section(config | changed, "folder/config.json")
    (problem,) = caught.value.problems
    assert problem.key == f"folder/config.json: {key}"
    assert says in f"{problem.message} ({problem.fix})"


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_what_switches_off_a_thing_that_we_do_not_compute_is_accepted(config):
    off = {"use_mrope": False, "scale": 0, "offset": 0.0, "vision_config": None, "prefix": "", "extra": [], "more": {}}
    off |= {"partial_rotary_factor": 1.0, "quantization_config": {}}
    off |= {"use_sliding_window": False} if config is not QWEN2 else {}
    assert model_section(config | off, "") == model_section(config, "")


def test_of_two_ropes_the_one_that_transformers_takes_is_read():
    both = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 5.0, "rope_type": "x"}}
    model = model_of(LLAMA | both)
    assert (model.rope_theta, model.rope_scaling) == (500000.0, RopeScaling(type="linear", factor=4.0))
    second = model_of(LLAMA | both | {"rope_scaling": None, "rope_parameters": {"rope_theta": 5.0}})
    assert (second.rope_theta, second.rope_scaling) == (5.0, None)


def test_zero_is_no_weight_of_yarn():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    zeros = dict.fromkeys(("mscale", "mscale_all_dim", "beta_fast", "beta_slow"), 0.0)
    assert model_of(LLAMA | {"rope_scaling": yarn | zeros}) == model_of(LLAMA | {"rope_scaling": yarn})
    unsaid = model_of(LLAMA | {"rope_scaling": yarn | {"factor": None}}).rope_scaling
    assert unsaid is not None
    assert unsaid.factor == LLAMA["max_position_embeddings"] / 64


def computed(config: dict[str, Any]) -> dict[str, Any]:
    """What is read of a config; transformers writes the width of a head that it computed."""
    section = model_section(config, "")
    return section | {"head_dim": section.get("head_dim") or section["hidden_size"] // section["num_heads"]}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("base", ["of transformers", "small"])
def test_a_missing_key_is_what_transformers_takes_for_it(name, base):
    transformers = pytest.importorskip("transformers", minversion="5")
    kind = BY_NAME[name].model_type
    small = {"num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 512, "rms_norm_eps": 1e-3}
    whole = transformers.AutoConfig.for_model(kind, **(small if base == "small" else {})).to_dict()
    whole |= {"architectures": [name]}
    for key in [None, *whole]:
        if key not in ("architectures", "model_type"):
            config = {k: v for k, v in whole.items() if k != key}
            theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
            assert computed(config) == computed(theirs | {"architectures": [name]}), key
    least = transformers.AutoConfig.for_model(kind).to_dict() | {"architectures": [name]}
    assert computed({"architectures": [name]}) == computed(least)


@pytest.mark.parametrize("name", ["mistral", "qwen2, window", "qwen3 moe", "deepseek v3"])
@pytest.mark.parametrize("value", [None, "x", "", [], {}, [[]], [{}], -1, 0, 1.5, True])
def test_a_value_of_another_kind_is_never_more_than_a_config_error(name, value, tmp_path):
    config = json.loads(json.dumps(hf_config(MODELS[name])))
    for key in [*config, "layer_types", "max_window_layers", "rope_parameters", "sliding_window"]:
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with contextlib.suppress(ConfigError):
            differences(read_config(tmp_path), read_model(tmp_path))


def test_a_model_of_a_folder_keeps_the_rules_and_an_error_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 5}))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json: model\.num_kv_heads: 5 does not divide"):
        read_model(tmp_path)


def test_windows_of_some_layers_are_read_where_they_are_of_all_or_none():
    config = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}
    assert model_of(config | {"max_window_layers": 0}).sliding_window == 64
    assert model_of(config | {"max_window_layers": 28}).sliding_window is None
    assert model_of(config | {"layer_types": ["full_attention"] * 28}).sliding_window is None


def test_null_means_what_transformers_takes_it_for():
    model = model_of(LLAMA | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None})
    assert (model.num_kv_heads, model.attention_head_dim, model.rope_scaling) == (32, 128, None)
    one_group = model_of(DEEPSEEK | {"n_group": 1, "topk_group": 1, "q_lora_rank": None})
    assert (one_group.num_expert_groups, one_group.expert_groups_per_token) == (0, 0)
    assert one_group.latent_attention is not None
    assert one_group.latent_attention.q_lora_rank is None
    assert one_group.validate() == []


def test_a_model_that_no_architecture_computes_says_what_is_in_the_way():
    model = replace(MODELS["qwen3"], attention_bias=True)
    with pytest.raises(ConfigError, match=r"Qwen\dForCausalLM cannot have model\.\w+=True$"):
        architecture_of(model)
    assert architecture_of(MODELS["qwen3"]).name == "Qwen3ForCausalLM"
    assert architecture_of(replace(MODELS["llama 2"], sliding_window=8)).name == "MistralForCausalLM"


def test_differences_name_the_fields_that_compute_something_else():
    section = model_section(LLAMA, "") | {"name": "m"}
    model = replace(decode(ModelConfig, section), name="other", rope_scaling=RopeScaling(factor=32.0))
    (difference,) = differences(section, model)
    assert difference.startswith("model.rope_scaling=RopeScaling(type='llama3', factor=32.0")


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: No such file"), ("{", "is no JSON"), ("[]", "is no JSON object")],
)
def test_an_unreadable_config_names_the_file(tmp_path, content, says):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json: {says}"):
        read_config(tmp_path)
