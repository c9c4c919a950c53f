"""Names and shapes of a model's tensors, ours and Hugging Face's, and whether a folder of safetensors has them.

Rotary positions pair the same channels in both, so no weight is permuted; only names differ, and stacked experts are
cut apart. Everything is found from the headers of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .decode import ConfigError
from .hf_architectures import architecture_of
from .model import ModelConfig
from .problem import Problem
from .safetensors_header import Shape, TensorHeader, read_header, unreadable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
READABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Safetensors' names of the dtypes that weights may be stored in."""

_TOP = {
    "embedding.weight": EMBEDDING,
    "norm.weight": "model.norm.weight",
    "head.weight": HEAD,
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q_a_proj": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b_proj": "self_attn.q_b_proj",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b_proj": "self_attn.kv_b_proj",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}
_MIXTURE = {
    "feed_forward.router": "gate",
    "feed_forward.shared_experts.gate_proj": "shared_experts.gate_proj",
    "feed_forward.shared_experts.up_proj": "shared_experts.up_proj",
    "feed_forward.shared_experts.down_proj": "shared_experts.down_proj",
}
_STACKED = {"feed_forward.experts.gate_proj": 0, "feed_forward.experts.up_proj": 1, "feed_forward.experts.down_proj": 2}


def tensor_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every parameter of `Decoder` and every buffer that is part of the model, by its name there, in its order."""
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(model, layer)}
    shapes["norm.weight"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def _layer_shapes(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = model.hidden_size
    yield "attention_norm.weight", (hidden,)
    yield from _latent_shapes(model) if model.latent_attention is not None else _attention_shapes(model)
    yield "attention.o_proj.weight", (hidden, model.num_heads * model.value_dim)
    yield "feed_forward_norm.weight", (hidden,)
    if not model.has_experts(layer):
        yield from _swiglu_shapes("feed_forward", hidden, model.intermediate_size)
        return
    experts, width = model.num_experts, model.expert_width
    if model.router_bias_update_speed is not None:
        yield "feed_forward.expert_bias", (experts,)
    yield "feed_forward.router.weight", (experts, hidden)
    for name, shape in zip(_STACKED, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
        yield name, (experts * shape[0], shape[1])
    if model.num_shared_experts:
        yield from _swiglu_shapes("feed_forward.shared_experts", hidden, model.num_shared_experts * width)


def _attention_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
        yield f"attention.{name}_proj.weight", (heads * model.attention_head_dim, model.hidden_size)
        if model.attention_bias:
            yield f"attention.{name}_proj.bias", (heads * model.attention_head_dim,)
    if model.qk_norm:
        yield "attention.q_norm.weight", (model.attention_head_dim,)
        yield "attention.k_norm.weight", (model.attention_head_dim,)


def _latent_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    latent, hidden, heads = model.latent_attention, model.hidden_size, model.num_heads
    assert latent is not None
    if latent.q_lora_rank is not None:
        yield "attention.q_a_proj.weight", (latent.q_lora_rank, hidden)
        yield "attention.q_a_norm.weight", (latent.q_lora_rank,)
        yield "attention.q_b_proj.weight", (heads * latent.qk_head_dim, latent.q_lora_rank)
    else:
        yield "attention.q_proj.weight", (heads * latent.qk_head_dim, hidden)
    yield "attention.kv_a_proj.weight", (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden)
    yield "attention.kv_a_norm.weight", (latent.kv_lora_rank,)
    width = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    yield "attention.kv_b_proj.weight", (width, latent.kv_lora_rank)


def _swiglu_shapes(module: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{module}.gate_proj.weight", (width, hidden)
    yield f"{module}.up_proj.weight", (width, hidden)
    yield f"{module}.down_proj.weight", (hidden, width)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one of our tensors, as Hugging Face's format has them."""

    tensor: str
    expert: int | None
    """Index into the first dimension of a tensor that stacks experts; None: the tensor has no such dimension."""
    first: int
    """Where the rows start in it."""
    rows: int


def pieces(name: str, rows: int, model: ModelConfig, *, fused: bool = False) -> list[Piece]:
    """Where the `rows` rows of our tensor `name` are, in order. Raises KeyError for a name that is none of ours.

    `fused`: experts as transformers 5 holds them, three-dimensional, gate above up. On disk both versions write one
    tensor an expert and matrix, unless told otherwise.
    """
    if name in _TOP:
        return [Piece(_TOP[name], None, 0, rows)]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    module, _, kind = rest.rpartition(".")
    if module in _LAYER:
        return [Piece(f"{prefix}{_LAYER[module]}.{kind}", None, 0, rows)]
    names = architecture_of(model).expert_tensors
    if names is None:
        raise KeyError(name)
    mixture = prefix + ("mlp" if fused else names[0])
    if kind == "expert_bias":
        return [Piece(f"{mixture}.gate.e_score_correction_bias", None, 0, rows)]
    if module in _MIXTURE:
        return [Piece(f"{mixture}.{_MIXTURE[module]}.{kind}", None, 0, rows)]
    which, width = _STACKED[rest], rows // model.num_experts
    if not fused:
        return [
            Piece(f"{mixture}.experts.{expert}.{names[1 + which]}.weight", None, 0, width)
            for expert in range(model.num_experts)
        ]
    tensor, first = (("gate_up_proj", 0), ("gate_up_proj", width), ("down_proj", 0))[which]
    return [Piece(f"{mixture}.experts.{tensor}", expert, first, width) for expert in range(model.num_experts)]


class WeightsFolder:
    """The headers of a folder of safetensors. Weights themselves are not read."""

    def __init__(self, folder: Path):
        """Raises ConfigError where there are no safetensors, or one of them is damaged or missing."""
        self.folder = folder
        self.tensors: dict[str, TensorHeader] = {}
        for file in self._files():
            self.tensors |= read_header(file)
        self.fused = any(name.endswith(".experts.gate_up_proj") for name in self.tensors)

    def _files(self) -> list[Path]:
        """Those that the index names, or the only one: a folder may hold the same weights in other formats too."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                names = set(json.loads(index.read_bytes())["weight_map"].values())
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise unreadable(index, f"is no index of safetensors: {error!r}") from None
            return [self.folder / str(name) for name in sorted(names)]
        single = self.folder / SINGLE_FILE
        if not single.is_file():
            other = next(iter(sorted(self.folder.glob("*.bin"))), None) if self.folder.is_dir() else None
            why = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}" if self.folder.is_dir() else "is no folder"
            raise unreadable(self.folder, why, f"convert {other.name} to safetensors" if other is not None else "")
        return [single]

    def problems(self, model: ModelConfig) -> list[Problem]:
        """What keeps these weights from being `model`'s: tensors that are missing, too many, of another shape or of a
        dtype that is no plain number."""
        try:
            wanted = _expected(model, fused=self.fused)
        except ConfigError as error:
            return error.problems
        problems = []
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            problems.append(self._missing(missing))
        extra = [name for name in self.tensors if name not in wanted and not _superfluous(name, model)]
        if extra:
            file = self.tensors[extra[0]].file
            problems.append(Problem(str(file), f"has {_some(extra)}, which the model does not"))
        if model.tie_embeddings and HEAD in self.tensors:
            wanted |= {HEAD: wanted[EMBEDDING]}  # a copy, which loading compares
        for name, shape in wanted.items():
            header = self.tensors.get(name)
            if header is None:
                continue
            if header.shape != shape:
                there, here = list(header.shape), list(shape)
                problems.append(Problem(str(header.file), f"{name} is {there}, and {here} in the model"))
            if header.dtype not in READABLE_DTYPES:
                fix = "convert it to bfloat16 or float32 first"
                problems.append(
                    Problem(str(header.file), f"{name} is of dtype {header.dtype}, which does not load", fix)
                )
        return problems[:5]

    def _missing(self, names: list[str]) -> Problem:
        index = self.folder / INDEX_FILE
        if not index.is_file():
            fix = "set model.tie_embeddings=true" if names == [HEAD] else ""
            return Problem(str(self.folder), f"has no tensor {_some(names)}", fix)
        # A tensor that is here and not read is the index's mistake: training without it would change the model.
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                found = read_header(file)
            except ConfigError:
                continue
            if there := [name for name in names if name in found]:
                return Problem(str(index), f"names no file for {_some(there)}, which {file.name} has", "correct it")
        return Problem(str(index), f"has no tensor {_some(names)}")


def _expected(model: ModelConfig, *, fused: bool) -> dict[str, Shape]:
    """Hugging Face's tensors of `model` and their shapes."""
    shapes: dict[str, Shape] = {}
    for name, (rows, *columns) in tensor_shapes(model).items():
        found = pieces(name, rows, model, fused=fused)
        for piece in found:
            if piece.expert is None:
                shapes[piece.tensor] = (piece.rows, *columns)
            else:
                _, height, *_ = shapes.get(piece.tensor, (0, 0))
                shapes[piece.tensor] = (model.num_experts, max(height, piece.first + piece.rows), *columns)
    return shapes


def _superfluous(name: str, model: ModelConfig) -> bool:
    """Tensors that files are known to have beside the model's: a copy of a tied head, tables of rotary positions, and
    DeepSeek-V3's layers for predicting further tokens, which come after the others."""
    if name.endswith(".rotary_emb.inv_freq") or (name == HEAD and model.tie_embeddings):
        return True
    parts = name.split(".")
    further = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= model.num_layers
    return further and model.latent_attention is not None


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
