"""The decoder against transformers' own Llama and Mixtral, on the same weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from chimera_train.config import ModelConfig, RopeScaling, decode
from chimera_train.config.flops import num_parameters
from chimera_train.model import Decoder, initialize
from chimera_train.model.hf import from_hf, hf_config, hf_names, to_hf
from chimera_train.model.moe import load_balancing_loss

RECIPES = Path(__file__).parents[2] / "recipes" / "model"
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
MODELS = {
    "llama 3.1": ModelConfig(**TINY, rope_scaling=SCALING),
    "llama 3.2, tied": ModelConfig(**TINY, rope_scaling=SCALING, tie_embeddings=True),
    "llama 3, wide heads": ModelConfig(**TINY, head_dim=16, rope_theta=10_000.0),
    "mixtral": ModelConfig(
        **TINY, rope_theta=1e6, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.02
    ),
}


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model


def hugging_face(config: ModelConfig, model: Decoder, folder: Path) -> torch.nn.Module:
    """Loaded as a user would load an export: config.json and safetensors from a folder."""
    import transformers
    from safetensors.torch import save_file

    weights = {}
    for name, parameter in model.named_parameters():
        weights |= {k: v.detach().contiguous() for k, v in to_hf(name, parameter, config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    config = MODELS[name]
    model = build(config)
    with torch.no_grad():  # norms of one would hide a norm that is not applied
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    reference = hugging_face(config, model, tmp_path)
    tokens = torch.randint(0, config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert theirs.std() > 0.5, "logits too small to compare"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_transformers(tmp_path):
    config = MODELS["llama 3.2, tied"]
    model = build(config)
    reference = hugging_face(config, model, tmp_path)
    tokens = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(2))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    (loss.total / 128).backward()
    theirs = reference(tokens, labels=tokens).loss
    theirs.backward()
    assert loss.total.item() / 128 == pytest.approx(theirs.item(), abs=1e-6)
    grads = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        for part, grad in to_hf(name, parameter.grad, config).items():
            torch.testing.assert_close(grad, grads[part].grad, atol=1e-6, rtol=1e-5, msg=name)


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


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_parameters_of_shipped_models_equal_the_closed_form(path):
    config = decode(ModelConfig, yaml.safe_load(path.read_text()))
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    assert {name.rsplit(".", 1)[-1] for name, _ in model.named_buffers()} <= {"expert_bias"}


@pytest.mark.parametrize("name", MODELS)
def test_names_go_to_hugging_face_and_back(name):
    config = MODELS[name]
    model = build(config)
    weights = {}
    for ours, parameter in model.named_parameters():
        parts = to_hf(ours, parameter.detach(), config)
        assert not set(parts) & set(weights)
        weights |= parts
    back = from_hf(weights, [n for n, _ in model.named_parameters()], config)
    for ours, parameter in model.named_parameters():
        assert torch.equal(back[ours], parameter)
    with pytest.raises(KeyError):
        hf_names("layers.0.attention.bias", config)
