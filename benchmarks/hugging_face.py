"""Every shipped model, shrunk, through transformers: the same logits, and back without losing a bit.

python benchmarks/hugging_face.py [MODEL ...]

Random weights are exported, read and run by transformers, written by transformers, and read again by us.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers
import yaml
from torch import Tensor

from chimera_train.config import LatentAttention, ModelConfig, decode
from chimera_train.config.hf_architectures import architecture_of
from chimera_train.export import export
from chimera_train.model import Decoder, initialize
from chimera_train.weights import ExportedWeights

MODELS = Path(__file__).parents[1] / "recipes" / "model"
TOKENS = 200


def shrunk(model: ModelConfig) -> ModelConfig:
    """All that makes the architecture, at a size that a laptop computes at once."""
    experts = min(model.num_experts, 16)
    latent, scaling = model.latent_attention, model.rope_scaling
    if latent is not None:
        rank = None if latent.q_lora_rank is None else 24
        latent = LatentAttention(
            q_lora_rank=rank, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
        )
    return replace(
        model,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=model.num_dense_layers + 2,
        num_heads=8,
        num_kv_heads=max(1, 8 * model.num_kv_heads // model.num_heads),
        head_dim=None if model.head_dim is None else 16,
        latent_attention=latent,
        sliding_window=None if model.sliding_window is None else TOKENS // 4,
        rope_scaling=None if scaling is None else replace(scaling, original_max_position_embeddings=TOKENS // 4),
        max_position_embeddings=2 * TOKENS,
        num_experts=experts,
        experts_per_token=min(model.experts_per_token, experts // 4),
        expert_intermediate_size=None if model.expert_intermediate_size is None else 32,
        initializer_range=0.2,
    )


class LiveWeights:
    """A model in memory, as an export reads it."""

    def __init__(self, model: Decoder):
        self.model = model.config
        self.origin = "memory"
        self._tensors = model.state_dict()

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()


def random_model(config: ModelConfig) -> Decoder:
    """Norms and biases too, which training starts at one and zero."""
    model = Decoder(config)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            low, high = (-0.1, 0.1) if name.endswith("bias") else (0.5, 1.5)
            tensor.uniform_(low, high, generator=generator)
    return model.eval()


def measure(config: ModelConfig) -> dict[str, object]:
    model = random_model(config)
    tokens = torch.randint(0, config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        export(LiveWeights(model), ours, dtype="float32")
        reference = transformers.AutoModelForCausalLM.from_pretrained(ours, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(tokens)
            difference = (logits - reference(tokens).logits).abs().max().item()
        reference.save_pretrained(theirs)
        again = ExportedWeights(theirs)
        exact = all(torch.equal(again.read(name), tensor) for name, tensor in model.state_dict().items())
    return {
        "architecture": architecture_of(config).name,
        "logits_difference": difference,
        "logits_std": logits.std().item(),
        "round_trip_exact": exact,
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = sys.argv[1:] or sorted(path.stem for path in MODELS.glob("*.yaml") if path.stem != "hf")
    rows = {}
    print(f"{'model, shrunk':<18} {'architecture':<22} {'largest difference of logits':>28} {'round trip':>11}")
    for name in names:
        config = shrunk(decode(ModelConfig, yaml.safe_load((MODELS / f"{name}.yaml").read_text())))
        rows[name] = row = measure(config)
        spread = f"{row['logits_difference']:.1e} (spread {row['logits_std']:.1f})"
        exact = "exact" if row["round_trip_exact"] else "DIFFERS"
        print(f"{name:<18} {row['architecture']:<22} {spread:>28} {exact:>11}")
    out = Path("build/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    (out / "hugging_face.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
