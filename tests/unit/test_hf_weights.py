"""A folder of weights against a model, from the headers alone, and rows of it read into any shard."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_reference import MODELS, build

from chimera_train.config import ConfigError, ModelConfig
from chimera_train.config.hf_config import hf_config
from chimera_train.config.hf_weights import WeightsFolder, tensor_shapes
from chimera_train.model.hf import HfReader, to_hf
from chimera_train.model.shards import Shard
from chimera_train.weights import ExportedWeights

KINDS = ["qwen2", "llama 3.2, tied", "mixtral", "qwen3 moe", "deepseek v3"]


def write(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """A folder as an export writes it; the model's tensors by our names."""
    ours, weights = build(config).state_dict(), {}
    for name, tensor in ours.items():
        weights |= {part: value.clone() for part, value in to_hf(name, tensor, config).items()}
    save_file(weights, folder / "model.safetensors")
    return ours


def write_fused(folder: Path, config: ModelConfig) -> None:
    """Experts as transformers 5 holds them in memory, and writes them if told to."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    modules = {name.split(".experts.")[0] for name in weights if ".experts." in name}
    for module in modules:
        names = ("w1", "w3", "w2") if "block_sparse_moe" in module else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([weights.pop(f"{module}.experts.{e}.{name}.weight") for e in range(config.num_experts)])
            for name in names
        )
        fused = module.replace("block_sparse_moe", "mlp")
        weights[f"{fused}.gate.weight"] = weights.pop(f"{module}.gate.weight")
        weights[f"{fused}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        weights[f"{fused}.experts.down_proj"] = down
    save_file(weights, path)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_box_of_any_tensor_is_that_of_the_whole(tmp_path, kind, fused):
    config = MODELS[kind]
    ours = write(tmp_path, config)
    if fused:
        write_fused(tmp_path, config)
    headers = WeightsFolder(tmp_path)
    assert headers.problems(config) == []
    reader = HfReader(headers, config)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == tensor_shapes(config)
    for name, whole in ours.items():
        shape = tuple(whole.shape)
        assert torch.equal(reader.read(name, shape), whole)
        every = [[(0, size), (0, 1), (size // 3, size // 3 + size // 2), (size - 1, size)] for size in shape]
        for box in itertools.product(*every):
            part = whole[tuple(slice(low, high) for low, high in box)]
            local = torch.empty_like(part, dtype=torch.float64)
            reader.fill(Shard(name, shape, tuple(low for low, _ in box), local))
            assert torch.equal(local, part.double()), (name, box)


def test_ranks_together_read_every_byte_once(tmp_path, monkeypatch):
    config, ranks, read = MODELS["qwen3 moe"], 3, []
    ours = write(tmp_path, config)

    class Counting:
        def __init__(self, box):
            self.box = box

        def __getitem__(self, where):
            found = self.box[where]
            read.append(found.numel())
            return found

    original = HfReader._slice
    monkeypatch.setattr(HfReader, "_slice", lambda self, tensor: Counting(original(self, tensor)))
    shares = []
    for rank in range(ranks):
        reader, before = HfReader(WeightsFolder(tmp_path), config), sum(read)
        for name, whole in ours.items():
            part = whole.tensor_split(ranks)[rank]
            start = sum(len(other) for other in whole.tensor_split(ranks)[:rank])
            reader.fill(Shard(name, tuple(whole.shape), (start,) + (0,) * (whole.ndim - 1), torch.empty_like(part)))
        shares.append(sum(read) - before)
    assert sum(shares) == sum(tensor.numel() for tensor in ours.values())
    assert max(shares) < 1.05 * min(shares)


Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda w: w.pop(Q), f"has no tensor {Q}"),
        (lambda w: [w.pop(Q), w.pop(GATE)], f"has no tensor {GATE} and 1 more"),
        (lambda w: w.update({"model.extra": torch.ones(1)}), "has model.extra, which the model does not"),
        (lambda w: w.update({Q.replace(".1.", ".2."): w[Q].clone()}), "has model.layers.2.self_attn.q_proj.weight"),
        (lambda w: w.update({Q: w[Q][:, :-1].clone()}), f"{Q} is [48, 47], and [48, 48] in the model"),
        (lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), f"{Q} is of dtype F8_E4M3, which does not load"),
        (lambda w: w.pop("lm_head.weight"), "has no tensor lm_head.weight (set model.tie_embeddings=true)"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_told_from_the_headers(tmp_path, damage, says):
    write(tmp_path, MODELS["llama 2"])
    weights = load_file(tmp_path / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (problem,) = WeightsFolder(tmp_path).problems(MODELS["llama 2"])
    assert says in f"{problem.key}: {problem.message} ({problem.fix})"


def test_known_superfluous_tensors_are_passed_over(tmp_path):
    for kind, extra in [
        ("llama 3.2, tied", "lm_head.weight"),
        ("llama 2", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("deepseek v3", "model.layers.3.eh_proj.weight"),
    ]:
        write(tmp_path, MODELS[kind])
        weights = load_file(tmp_path / "model.safetensors")
        copied = weights["model.embed_tokens.weight"].clone() if extra == "lm_head.weight" else torch.ones(3)
        save_file(weights | {extra: copied}, tmp_path / "model.safetensors")
        assert WeightsFolder(tmp_path).problems(MODELS[kind]) == []


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3 moe", "deepseek v3"])
def test_experts_that_no_architecture_has_are_a_problem_and_no_crash(tmp_path, architecture):
    write(tmp_path, MODELS[architecture])
    (problem,) = WeightsFolder(tmp_path).problems(replace(MODELS[architecture], router_bias_update_speed=None,
                                                          latent_attention=None, attention_bias=True))  # fmt: skip
    assert "no architecture of Hugging Face computes this model" in problem.message


def test_a_tied_head_must_be_the_embedding(tmp_path):
    tied = MODELS["llama 3.2, tied"]
    write(tmp_path, tied)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tied)))
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(ExportedWeights(tmp_path).read("embedding.weight"), embedding)
    save_file(weights | {"lm_head.weight": embedding[1:].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: lm_head\.weight is \[95, 48\], and \[96, 48\]"):
        ExportedWeights(tmp_path)
    other = embedding.clone()
    other[-1, -1] += 1
    save_file(weights | {"lm_head.weight": other}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: lm_head\.weight is not model\.embed_tokens\.weight"):
        ExportedWeights(tmp_path).read("embedding.weight")
    # What the error says to set, and that a rank sees only what it has of it.
    headers, untied = WeightsFolder(tmp_path), replace(tied, tie_embeddings=False)
    assert headers.problems(untied) == []
    assert torch.equal(HfReader(headers, untied).read("head.weight", (96, 48)), other)
    assert torch.equal(HfReader(headers, untied).read("embedding.weight", (96, 48)), embedding)
    HfReader(headers, tied).fill(Shard("embedding.weight", (96, 48), (0, 0), torch.empty(95, 48)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_no_number_is_found_by_who_loads_it(tmp_path, value, dtype):
    write(tmp_path, MODELS["mixtral"])
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    weights[name] = weights[name].to(dtype)
    weights[name][5, 7] = value
    save_file(weights, tmp_path / "model.safetensors")
    reader = HfReader(WeightsFolder(tmp_path), MODELS["mixtral"])
    up, experts = "layers.1.feed_forward.experts.up_proj", (4 * 80, 48)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {name} has NaN or infinite values"):
        reader.read(up, experts)
    reader.fill(Shard(up, experts, (0, 0), torch.empty(2 * 80, 48)))


def test_an_error_of_safetensors_names_the_file(tmp_path):
    write(tmp_path, MODELS["llama 2"])
    headers = WeightsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"changed since")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/model\.safetensors: {Q} cannot be read: .*header"):
        HfReader(headers, MODELS["llama 2"]).read("layers.1.attention.q_proj.weight", (48, 48))


def test_an_index_that_leaves_out_a_tensor_is_said_to(tmp_path):
    write(tmp_path, MODELS["llama 2"])
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file({"lm_head.weight": weights.pop("lm_head.weight")}, tmp_path / "b.safetensors")
    save_file(weights, tmp_path / "a.safetensors")
    index(tmp_path, {"weight_map": dict.fromkeys(weights, "a.safetensors")})
    (problem,) = WeightsFolder(tmp_path).problems(MODELS["llama 2"])
    assert problem.key.endswith("model.safetensors.index.json")
    assert problem.message == "names no file for lm_head.weight, which b.safetensors has"
    assert "tie_embeddings" not in problem.fix


def test_bfloat16_and_float16_are_read_exactly(tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        ours = write(tmp_path, MODELS["qwen3"])
        weights = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        save_file(weights, tmp_path / "model.safetensors")
        local = torch.empty(96, 48)
        HfReader(WeightsFolder(tmp_path), MODELS["qwen3"]).fill(Shard("embedding.weight", (96, 48), (0, 0), local))
        assert torch.equal(local, ours["embedding.weight"].to(dtype).float())


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_short, r"model\.safetensors: is damaged: \d+ bytes of tensors are announced, and \d+ are there"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 20), "the header is longer than the file"),
        (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "convert pytorch_model.bin to"),
        (lambda f: index(f, {"weight_map": {Q: "gone.safetensors"}}), r"gone\.safetensors: is named by the index"),
        (lambda f: index(f, []), r"model\.safetensors\.index\.json: is no index of safetensors"),
    ],
)  # fmt: skip
def test_a_damaged_folder_names_the_file(tmp_path, damage, says):
    write(tmp_path, MODELS["llama 2"])
    damage(tmp_path)
    with pytest.raises(ConfigError, match=says):
        WeightsFolder(tmp_path)
