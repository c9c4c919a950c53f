"""The decoder against transformers' own models of every architecture, on the same weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from chimera_train.config import LatentAttention, ModelConfig, RopeScaling, decode
from chimera_train.config.flops import num_parameters
from chimera_train.config.hf_config import hf_config
from chimera_train.config.hf_weights import pieces, tensor_shapes
from chimera_train.model import Decoder, initialize
from chimera_train.model.hf import to_hf
from chimera_train.model.moe import load_balancing_loss

SHIPPED = [
    path for path in sorted((Path(__file__).parents[2] / "recipes" / "model").glob("*.yaml")) if path.stem != "hf"
]
TINY = {
    "name": "tiny",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
SCALING = RopeScaling(factor=8.0, original_max_position_embeddings=32)
YARN = RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=64)
DEEPSEEK_YARN = replace(YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.8)
QWEN = TINY | {"norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 16, "qk_norm": True}
EXPERTS = {"num_experts": 8, "experts_per_token": 3, "expert_intermediate_size": 24}
DEEPSEEK = (
    TINY
    | EXPERTS
    | {"norm_eps": 1e-6, "rope_theta": 1e4, "num_kv_heads": 6, "num_layers": 3, "num_dense_layers": 1}
    | {"router_scoring": "sigmoid", "routed_scaling_factor": 2.5, "num_shared_experts": 2}
    | {"num_expert_groups": 4, "expert_groups_per_token": 2, "router_bias_update_speed": 0.0}
)
LATENT = LatentAttention(q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
MODELS = {
    "llama 2": ModelConfig(**TINY | {"num_kv_heads": 6}, rope_theta=1e4),
    "llama 3.1": ModelConfig(**TINY, rope_scaling=SCALING),
    "llama 3.2, tied": ModelConfig(**TINY, rope_scaling=SCALING, tie_embeddings=True),
    "llama 3, wide heads": ModelConfig(**TINY, head_dim=16, rope_theta=10_000.0),
    "llama, linear rope": ModelConfig(**TINY, rope_scaling=RopeScaling(type="linear", factor=4.0)),
    "llama, yarn": ModelConfig(**TINY, rope_scaling=replace(YARN, beta_fast=8.0, truncate=False)),
    "llama, yarn of one border": ModelConfig(**TINY, rope_scaling=replace(YARN, beta_fast=1.0)),
    "mistral": ModelConfig(**TINY, rope_theta=1e4, sliding_window=24),
    "qwen2": ModelConfig(**TINY, attention_bias=True, rope_theta=1e6),
    "qwen2, window": ModelConfig(**TINY, attention_bias=True, sliding_window=24),
    "qwen3": ModelConfig(**QWEN, tie_embeddings=True),
    "qwen3, yarn": ModelConfig(**QWEN, rope_scaling=YARN),
    "mixtral": ModelConfig(
        **TINY, rope_theta=1e6, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.02
    ),
    "mixtral, window": ModelConfig(**TINY, num_experts=4, experts_per_token=2, sliding_window=24),
    "qwen3 moe": ModelConfig(**QWEN | EXPERTS),
    "qwen3 moe, dense layers, not normalised": ModelConfig(
        **QWEN | EXPERTS, num_dense_layers=1, normalize_expert_weights=False
    ),
    "deepseek v3": ModelConfig(**DEEPSEEK, latent_attention=LATENT, rope_scaling=DEEPSEEK_YARN),
    "deepseek v3, no query latent, no groups": ModelConfig(
        **DEEPSEEK | {"num_expert_groups": 0, "expert_groups_per_token": 0, "normalize_expert_weights": False},
        latent_attention=replace(LATENT, q_lora_rank=None),
    ),
}


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    initialize(model, seed)
    # Norms of one and biases of zero would hide that they are not applied.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.uniform_(-0.1, 0.1, generator=generator)
            elif tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5, generator=generator)
    return model


def hugging_face(config: ModelConfig, model: Decoder, folder: Path) -> torch.nn.Module:
    """Loaded as a user would load an export: config.json and safetensors from a folder."""
    import transformers
    from safetensors.torch import save_file

    weights = {}
    for name, tensor in model.state_dict().items():
        weights |= {k: v.detach().contiguous() for k, v in to_hf(name, tensor, config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return reference.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    config = MODELS[name]
    assert config.validate() == []
    model = build(config)
    reference = hugging_face(config, model, tmp_path)
    tokens = torch.randint(0, config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert theirs.std() > 0.5, "logits too small to compare"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama 3.2, tied", "qwen2", "qwen3 moe", "deepseek v3"])
def test_gradients_equal_those_of_transformers(name, tmp_path):
    config = MODELS[name]
    model = build(config)
    reference = hugging_face(config, model, tmp_path)
    tokens = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(2))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    (loss.total / 128).backward()
    theirs = reference(tokens, labels=tokens).loss
    theirs.backward()
    assert loss.total.item() / 128 == pytest.approx(theirs.item(), abs=1e-6)
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        for piece in pieces(name, parameter.shape[0], config, fused=config.num_experts > 0):
            theirs = grads[piece.tensor] if piece.expert is None else grads[piece.tensor][piece.expert]
            theirs = theirs[piece.first : piece.first + piece.rows]
            rows = slice(*((piece.expert or 0) * piece.rows + row for row in (0, piece.rows)))
            torch.testing.assert_close(parameter.grad[rows], theirs, atol=1e-6, rtol=1e-5, msg=name)


def test_load_balancing_loss_is_that_of_mixtral():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = MODELS["mixtral"]
    router = build(config).layers["0"].feed_forward.router
    logits = router(torch.randn(60, config.hidden_size, generator=torch.Generator().manual_seed(3)))
    chosen = logits.topk(config.experts_per_token).indices
    ours = load_balancing_loss(logits.softmax(-1), torch.bincount(chosen.flatten(), minlength=4), 60)
    theirs = load_balancing_loss_func((logits,), config.num_experts, config.experts_per_token)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_load_balancing_loss_reaches_the_router_weighted_by_tokens():
    config = MODELS["mixtral"]
    tokens = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(4))

    def router_gradient(coefficient: float) -> torch.Tensor:
        model = build(replace(config, router_aux_loss_coefficient=coefficient))
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        return model.layers["1"].feed_forward.router.weight.grad

    model = build(config)
    layer, seen = model.layers["1"].feed_forward, []
    layer.router.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    model(tokens[:, :-1])
    chosen = seen[0].topk(config.experts_per_token).indices
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts)
    (0.02 * 64 * load_balancing_loss(seen[0].softmax(-1), counts, 64) / 2).backward()
    torch.testing.assert_close(
        router_gradient(0.02) - router_gradient(0.0), layer.router.weight.grad, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_parameters_of_shipped_models_equal_the_closed_form(path):
    config = decode(ModelConfig, yaml.safe_load(path.read_text()))
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    assert {name.rsplit(".", 1)[-1] for name, _ in model.named_buffers()} <= {"expert_bias"}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == tensor_shapes(config)
