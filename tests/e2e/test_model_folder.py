"""A run from a folder in Hugging Face's format and back: transformers writes it, the run starts from it, transformers
reads what the run exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import chimera_sm as ch
from chimera_sm.cli.main import run as main
from chimera_train.weights import CheckpointWeights, load_model

pytestmark = pytest.mark.train

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip


def folder_of(kind: str, folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **COMMON | FOLDERS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def launched(folder: Path, shards: Path, *overrides: str) -> ch.Run:
    settings = ["recipe=tiny", "model=hf", f"model.path={folder}", "data=local", f"data.uri={shards}"]
    settings += ["train.sequence_length=64", "train.global_batch_size=4", "train.micro_batch_size=2"]
    settings += ["train.num_steps=2", "optim.warmup_steps=1", "checkpoint.interval_steps=2", "evaluation=none"]
    return ch.launch(ch.plan(ch.compose([*settings, *overrides])))


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_run_starts_from_a_folder_and_its_export_is_read(kind: str, runs: None, shards: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = launched(folder_of(kind, tmp_path / "start"), shards, "optim.learning_rate=1e-9")
    assert run.wait(timeout_s=180).state == "completed"
    assert f"initial weights from {tmp_path}/start" in (run.record.path / "logs" / "algo-1.log").read_text()
    assert main(["export", run.id, "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    began, ended = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("start", "out"))
    tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(1))
    weights = CheckpointWeights(run.record.path / "s3" / "checkpoints")
    ours = load_model(weights, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        before, after, mine = began(tokens).logits, ended(tokens).logits, ours(tokens)
    torch.testing.assert_close(mine, after, atol=1e-4, rtol=1e-4)
    # So small a learning rate leaves the weights where they were: the run did start from them.
    torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)


def test_a_head_that_differs_from_the_embedding_is_refused_and_the_fix_works(
    runs: None, shards: Path, tmp_path: Path
) -> None:
    folder = folder_of("llama", tmp_path)
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file), file, metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    refused = launched(folder, shards)
    with pytest.raises(ch.RunFailed, match=r"lm_head\.weight is not .* \(set model\.tie_embeddings=false"):
        refused.wait(timeout_s=180)
    assert launched(folder, shards, "model.tie_embeddings=false").wait(timeout_s=180).state == "completed"
