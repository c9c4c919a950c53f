"""Weights in Hugging Face's format, both ways: our tensors cut apart for writing, and rows of them read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..config.hf_weights import WeightsFolder, pieces
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
        """Copy the shard's box into it, as the dtype that it has. A file is mapped into memory, not read whole."""
        start, end = shard.offset[0], shard.offset[0] + shard.local.shape[0]
        others = tuple(slice(o, o + n) for o, n in zip(shard.offset[1:], shard.local.shape[1:], strict=True))
        row = 0
        for piece in pieces(shard.name, shard.shape[0], self._model, fused=self._headers.fused):
            low, high = max(start, row), min(end, row + piece.rows)
            if low < high:
                rows = slice(piece.first + low - row, piece.first + high - row)
                box = self._slice(piece.tensor)
                if piece.expert is None:
                    found = box[(rows, *others)]
                else:
                    found = box[(slice(piece.expert, piece.expert + 1), rows, *others)][0]
                shard.local[low - start : high - start].copy_(found)
            row += piece.rows

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole tensor of ours, in the dtype that the file has it in."""
        piece = pieces(name, shape[0], self._model, fused=self._headers.fused)[0]
        whole = torch.empty(shape, dtype=self._slice(piece.tensor)[:0].dtype)
        self.fill(Shard(name, shape, (0,) * len(shape), whole))
        return whole

    def _slice(self, tensor: str) -> Any:
        from safetensors import safe_open

        file = self._headers.tensors[tensor].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(tensor)
