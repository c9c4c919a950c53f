"""Whole parameters out of a checkpoint or an exported folder, one at a time, in a single process."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .checkpoint import CheckpointError, CheckpointStore
from .checkpoint.manifest import MANIFEST, differing_model_fields
from .checkpoint.state import MODEL
from .checkpoint.storage import OnceReader
from .checkpoint.store import Torn
from .config import ConfigError, ModelConfig, RecipeFile, RopeScaling, decode
from .model import Decoder
from .model.hf import from_hf, hf_names


class Weights(Protocol):
    """Where parameters come from. `read` gives a whole parameter by its name in `Decoder`, on the CPU."""

    model: ModelConfig
    origin: str

    def read(self, name: str) -> Tensor: ...


def empty_model(config: ModelConfig) -> Decoder:
    """The model on the meta device: names and shapes."""
    with torch.device("meta"):
        return Decoder(config)


class CheckpointWeights:
    """Parameters of one checkpoint, every byte of which has been checked."""

    def __init__(self, folder: Path, step: int | Literal["newest"] = "newest", recipe: RecipeFile | None = None):
        """`folder`: a store of checkpoints, or one checkpoint in it, which `step` then does not change.

        Raises CheckpointError where there is no complete checkpoint, or where it is of another model than `recipe`'s.
        """
        if (folder / MANIFEST).exists():
            store = CheckpointStore(folder.parent, shared=True)
            found = store.examine(folder.name)
            if isinstance(found, Torn):
                raise CheckpointError(f"{folder} is no complete checkpoint: {found.reason}")
        else:
            store = CheckpointStore(folder, shared=True)
            found = store.open(step)
        self.step = found.manifest.step
        self.origin = f"{store.root / found.name} (step {self.step})"
        if problems := store.verify(found.name, found.files):
            raise CheckpointError(f"{self.origin} is damaged: {'; '.join(problems[:3])}")
        if recipe is not None and (differing := differing_model_fields(found.manifest.model, recipe.recipe.model)):
            raise CheckpointError(f"{self.origin} is of another model than the recipe's: {'; '.join(differing)}")
        try:
            self.model = decode(ModelConfig, found.manifest.model, "model")
        except ConfigError as error:
            raise CheckpointError(f"{self.origin} is of a model that this release does not know: {error}") from None
        self._reader = OnceReader(store.root / found.name)
        self._saved = self._reader.read_metadata().state_dict_metadata

    def read(self, name: str) -> Tensor:
        saved = self._saved.get(MODEL + name)
        if saved is None:
            raise CheckpointError(f"{self.origin} has no parameter {name}")
        whole = {MODEL + name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(whole, storage_reader=self._reader, no_dist=True)
        return whole[MODEL + name]


class ExportedWeights:
    """Parameters of a folder in Hugging Face's format, as `export` writes it."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.origin = str(folder)
        try:
            self.model = _model_config(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder} has no config.json of a Llama or Mixtral: {error!r}") from None
        self._tensors: dict[str, Any] = {}  # name → the open file that has it
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from None
            self._tensors |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> Tensor:
        parts = hf_names(name, self.model)
        missing = [part for part in parts if part not in self._tensors]
        if missing:
            raise CheckpointError(f"{self.origin} has no tensor {missing[0]}")
        return from_hf({part: self._tensors[part].get_tensor(part) for part in parts}, [name], self.model)[name]


def load_model(weights: Weights, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The whole model on one device, filled parameter by parameter."""
    model = empty_model(weights.model)
    for parameter in model.parameters():  # not the buffers, which stay in float32
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights.read(name))
    return model.eval()


def _model_config(hf: dict[str, Any]) -> ModelConfig:
    """The inverse of `model.hf.hf_config`; KeyError where a key is missing that it writes."""
    scaling = hf.get("rope_scaling")
    return ModelConfig(
        name=hf["model_type"],
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=hf["rope_theta"],
        rope_scaling=RopeScaling(**{k: v for k, v in scaling.items() if k != "rope_type"}) if scaling else None,
        max_position_embeddings=hf["max_position_embeddings"],
        tie_embeddings=hf["tie_word_embeddings"],
        num_experts=hf.get("num_local_experts", 0),
        experts_per_token=hf.get("num_experts_per_tok", 0),
    )
