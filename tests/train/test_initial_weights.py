"""Starting from a folder in Hugging Face's format: every mesh reads it exactly, and a wrong folder stops every rank."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from spawn import run_distributed
from test_parity_layouts import Row, recipe_of
from test_parity_train import VOCAB, fresh, losses, recipe_file, run
from test_parity_train import root as root
from torch import nn

from chimera_train.config import ConfigError, LatentAttention, ModelConfig, layout
from chimera_train.config.hf_config import hf_config
from chimera_train.export import export_model
from chimera_train.initial_weights import load_initial_weights
from chimera_train.model import Decoder, initialize
from chimera_train.model.hf import to_hf
from chimera_train.parallel import Meshes
from chimera_train.parallel.build import build_model

SIZES = {"name": "m", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "num_heads": 4}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 24}
MODELS = {
    "qwen2": ModelConfig(**SIZES, num_kv_heads=2, attention_bias=True),
    "tied": ModelConfig(**SIZES, num_kv_heads=2, tie_embeddings=True),
    "qwen3 moe": ModelConfig(**SIZES, **EXPERTS, num_kv_heads=2, head_dim=16, qk_norm=True),
    "deepseek": ModelConfig(
        **SIZES, **EXPERTS, num_kv_heads=4, num_dense_layers=1, num_shared_experts=1, router_scoring="sigmoid",
        router_bias_update_speed=0.0,
        latent_attention=LatentAttention(
            q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
        ),
    ),
}  # fmt: skip
MESHES = {
    "fsdp 4": {},
    "hsdp 2x2": {"data_parallel": 2},
    "tp2 x fsdp2": {"tensor_parallel": 2},
    "fsdp2 x cp2": {"context_parallel": 2},
    "pp2 x fsdp2": {"pipeline_parallel": 2},
    "pp2 x tp2": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "ep4": {"expert_parallel": 4},
    "ep2 x tp2": {"expert_parallel": 2, "tensor_parallel": 2},
}
CASES = [
    (kind, mesh) for kind in MODELS for mesh in MESHES if MODELS[kind].num_experts or "ep" not in mesh
]  # fmt: skip


def write(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """A folder of random weights; what they are by our names."""
    model = Decoder(config)
    initialize(model, 5)
    generator = torch.Generator().manual_seed(6)
    ours, weights = model.state_dict(), {}
    for name, tensor in ours.items():
        if tensor.ndim == 1:
            tensor.normal_(generator=generator)
        weights |= {part: value.clone() for part, value in to_hf(name, tensor, config).items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return ours


def sharded(config: ModelConfig, degrees: dict[str, int]) -> nn.Module:
    recipe = replace(recipe_of(Row("import", 4, parallel=degrees)), model=config)
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=torch.distributed.get_world_size())
    return build_model(recipe, Meshes(mesh_layout, "cpu"), torch.device("cpu"))


def import_all(root: Path) -> dict[tuple[str, str], dict[str, bool]]:
    """By case, what this rank holds anything of, and whether it is the folder's; and each case exports it."""
    found = {}
    for kind, mesh in CASES:
        model = sharded(MODELS[kind], MESHES[mesh])
        assert load_initial_weights(model, MODELS[kind], root / kind) == []
        expected = torch.load(root / f"{kind}.pt")
        full = {name: p.full_tensor().detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
        found[kind, mesh] = {name: torch.equal(tensor, expected[name]) for name, tensor in full.items()}
        if "pp" not in mesh:
            export_model(model, MODELS[kind], root / f"{kind}, {mesh}", dtype="float32")
    return found


@pytest.mark.train
def test_every_mesh_reads_its_shards_and_writes_them_back_bit_for_bit(tmp_path):
    expected = {kind: write(tmp_path / kind, config) for kind, config in MODELS.items()}
    for kind, tensors in expected.items():
        torch.save(tensors, tmp_path / f"{kind}.pt")
    ranks = run_distributed(import_all, 4, tmp_path)
    for kind, mesh in CASES:
        held = [(name, same) for found in ranks for name, same in found[kind, mesh].items()]
        assert {name for name, same in held if not same} == set(), (kind, mesh)
        assert {name for name, _ in held} == set(expected[kind]), (kind, mesh)
        if "pp" not in mesh:
            before, after = (load_file(tmp_path / name / "model.safetensors") for name in (kind, f"{kind}, {mesh}"))
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before), (kind, mesh)


SMALL = ModelConfig(
    name="small", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2
)


@pytest.mark.train
def test_a_run_starts_from_the_weights_and_later_from_its_checkpoint(root):
    folder = root / "input" / "data" / "train" / "start"
    model = Decoder(SMALL)
    initialize(model, recipe_file().recipe.train.seed)
    export_model(model, SMALL, folder, dtype="float32")
    codes, _ = run(root, recipe_file())
    plain, again = losses(root), fresh(root, "again")
    file = recipe_file(workers=2, train={"initial_weights": "train/start"})
    started, outputs = run(again, file)
    assert codes + started == [0, 0, 0]
    assert f"initial weights from {again}/input/data/train/start" in outputs[0]
    # The very weights that a run without them draws, so the same curve.
    assert losses(again) == pytest.approx(plain, rel=1e-6)
    shutil.rmtree(folder)
    codes, outputs = run(again, file)
    assert codes == [0, 0], outputs
    codes, outputs = run(fresh(root, "anew"), file)
    assert codes == [1, 1]
    for output in outputs:
        assert "train.initial_weights: " in output
        assert "start/config.json: cannot be read: No such file or directory" in output


def refused(folder: Path) -> str:
    """What a rank says; one of the two sees a damaged file."""
    mine = folder / "whole" if torch.distributed.get_rank() == 0 else folder / "damaged"
    try:
        load_initial_weights(sharded(MODELS["qwen2"], {}), MODELS["qwen2"], mine)
    except ConfigError as error:
        return str(error)
    return "loaded"


@pytest.mark.train
def test_what_one_host_finds_stops_every_rank_with_the_same_error(tmp_path):
    for name in ("whole", "damaged"):
        write(tmp_path / name, MODELS["qwen2"])
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    first, second = run_distributed(refused, 2, tmp_path)
    assert first == second == f"train.initial_weights: {tmp_path}/damaged: has no tensor model.norm.weight"
