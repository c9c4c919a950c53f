"""Weights in Hugging Face's format, both ways: our tensors cut apart for writing, and rows of them read from files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError, ModelConfig, Problem
from ..config.hf_weights import EMBEDDING, HEAD, WeightsFolder, pieces
from .shards import Shard


def to_hf(name: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """One whole tensor of ours under its Hugging Face names; views of it, which stacked experts share."""
    found = pieces(name, tensor.shape[0], model)
    return dict(zip((p.tensor for p in found), tensor.split([p.rows for p in found]), strict=True))


class HfReader:
    """Reads out of a folder of safetensors just the rows and columns that are asked for."""

    def __init__(self, headers: WeightsFolder, model: ModelConfig):
        """`headers` must have no problems with `model`."""
        self._headers = headers
        self._model = model
        self._open: dict[Path, Any] = {}

    def fill(self, shard: Shard) -> None:
        """Copy the shard's box into it, as the dtype that it has. A file is mapped into memory, not read whole.

        Raises ConfigError, which names file and tensor, where the box cannot be read, has values that are no numbers,
        or is of an embedding that the model ties to a head of other values.
        """
        start, end = shard.offset[0], shard.offset[0] + shard.local.shape[0]
        others = tuple(slice(o, o + n) for o, n in zip(shard.offset[1:], shard.local.shape[1:], strict=True))
        row = 0
        for piece in pieces(shard.name, shard.shape[0], self._model, fused=self._headers.fused):
            low, high = max(start, row), min(end, row + piece.rows)
            if low < high:
                rows = slice(piece.first + low - row, piece.first + high - row)
                if piece.expert is None:
                    found = self._box(piece.tensor, (rows, *others))
                else:
                    found = self._box(piece.tensor, (slice(piece.expert, piece.expert + 1), rows, *others))[0]
                if piece.tensor == EMBEDDING and self._model.tie_embeddings and HEAD in self._headers.tensors:
                    self._check_tied(found, (rows, *others))
                shard.local[low - start : high - start].copy_(found)
            row += piece.rows

    def _check_tied(self, embedding: Tensor, box: tuple[slice, ...]) -> None:
        """Transformers does not tie a head that has values of its own, whatever config.json says.

        Every rank compares what it loads anyway: none reads a whole embedding."""
        if bool((self._box(HEAD, box) != embedding).any()):
            message = f"{HEAD} is not {EMBEDDING}, which model.tie_embeddings=true would have it be"
            fix = "set model.tie_embeddings=false, or tie_word_embeddings=false in its config.json"
            raise ConfigError([Problem(str(self._headers.tensors[HEAD].file), message, fix)])

    def _box(self, tensor: str, box: tuple[slice, ...]) -> Tensor:
        with self._naming(tensor):
            found: Tensor = self._slice(tensor)[box]
        # The extremes show NaN and infinity, without a mask as large as the box.
        if not all(extreme.isfinite() for extreme in torch.aminmax(found)):
            file = self._headers.tensors[tensor].file
            raise ConfigError([Problem(str(file), f"{tensor} has NaN or infinite values")])
        return found

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole tensor of ours, in the dtype that the file has it in. Raises ConfigError, as `fill` does."""
        piece = pieces(name, shape[0], self._model, fused=self._headers.fused)[0]
        whole = torch.empty(shape, dtype=self._slice(piece.tensor)[:0].dtype)
        self.fill(Shard(name, shape, (0,) * len(shape), whole))
        return whole

    def _slice(self, tensor: str) -> Any:
        from safetensors import safe_open

        file = self._headers.tensors[tensor].file
        if file not in self._open:
            with self._naming(tensor):
                self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(tensor)

    @contextlib.contextmanager
    def _naming(self, tensor: str) -> Iterator[None]:
        """Errors of safetensors name neither the file nor the tensor."""
        from safetensors import SafetensorError

        try:
            yield
        except SafetensorError as error:
            file = self._headers.tensors[tensor].file
            raise ConfigError([Problem(str(file), f"{tensor} cannot be read: {error}")]) from None
