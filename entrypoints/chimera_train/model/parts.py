"""The pieces of a model that one rank holds, as one module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .decoder import Decoder


class ModelParts(nn.Module):
    """Stages of a decoder on one rank of a pipeline, under the names of the single-process model.

    Parameters, state and initialisation are those of the stages; it computes nothing itself. A tied embedding belongs
    to the first stage: the last one's copy is `tied_copy`, which is no parameter here, so that the matrix is optimized,
    counted and saved once.
    """

    def __init__(self, parts: Sequence[Decoder]):
        super().__init__()
        self.parts = tuple(parts)  # a tuple, which does not register them: their modules are registered below
        self.config = parts[0].config
        self.sequence = parts[0].sequence
        first, last = parts[0], parts[-1]  # a rank's stages are in order
        self.embedding = first.embedding if first.stage.first else None
        self.layers = nn.ModuleDict({number: block for part in parts for number, block in part.layers.items()})
        self.norm, self.head = last.norm, last.head

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The last stage's copy of the embedding, on the rank that has that stage."""
        last = self.parts[-1]
        return None if last.stage.first or last.embedding is None else last.embedding.weight
