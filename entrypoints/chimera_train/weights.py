"""Whole parameters out of a checkpoint or an exported folder, one at a time, in a single process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .checkpoint import CheckpointError, CheckpointStore
from .checkpoint.manifest import MANIFEST, differing_model_fields
from .checkpoint.state import MODEL
from .checkpoint.storage import OnceReader
from .checkpoint.store import Torn
from .config import ConfigError, ModelConfig, RecipeFile, decode
from .config.hf_config import read_model
from .config.hf_weights import WeightsFolder, tensor_shapes
from .model import Decoder
from .model.hf import HfReader


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
    """Parameters of a folder in Hugging Face's format: an export, or any model of an architecture that we know."""

    def __init__(self, folder: Path):
        """Raises ConfigError where the folder is not such a model, whole."""
        self.origin = str(folder)
        self.model = read_model(folder)
        headers = WeightsFolder(folder)
        if problems := headers.problems(self.model):
            raise ConfigError(problems)
        self._shapes = tensor_shapes(self.model)
        self._reader = HfReader(headers, self.model)

    def read(self, name: str) -> Tensor:
        return self._reader.read(name, self._shapes[name])


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
