"""What a model is fed: which tokens of every sequence this rank has, at which positions, in which documents.

Shapes, by suffix: B sequences, S tokens of a sequence on this rank, W tokens of the whole sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .flash import Segments


class Documents(NamedTuple):
    """Of a micro-batch whose attention stays inside a document."""

    positions_BS: Tensor
    """Of a token in its document, int64."""
    segments: tuple[Segments, ...]
    """One for each piece of a sequence."""


class Inputs(NamedTuple):
    """Of one micro-batch, on the device."""

    tokens_BS: Tensor
    labels_BS: Tensor
    """The token after each; loss.IGNORE_INDEX for none."""
    documents: Documents | None
    """None: attention crosses documents."""


class WholeSequence:
    """Every sequence stands whole on this rank. Context parallel puts another in its place."""

    end_of_document: int | None = None
    """The token that ends a document, where attention stays inside of documents; None: it crosses them."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Of `length` tokens of a sequence, the ones on this rank, in the whole of it: int64 [S]."""
        return torch.arange(length, device=device)

    def pieces(self, length: int) -> list[range]:
        """The consecutive tokens of this rank, in the order in which it holds them, of a sequence of W = `length`."""
        return [range(length)]

    def attends(self, length: int) -> list[range]:
        """The consecutive queries that one call of attention computes."""
        return self.pieces(length)

    def feed(self, micro_batch: np.ndarray, device: torch.device) -> Inputs:
        """This rank's part of a micro-batch, int64 [B, W + 1]; the host does not wait for the device.

        Inputs are [:, :-1] and labels [:, 1:]; as an input, what is no label stands for token 0.
        """
        inputs_BW = np.maximum(micro_batch[:, :-1], 0)
        pieces = [slice(piece.start, piece.stop) for piece in self.pieces(inputs_BW.shape[1])]
        tokens_BS, labels_BS = (
            to_device(np.concatenate([whole[:, piece] for piece in pieces], axis=1), device)
            for whole in (inputs_BW, micro_batch[:, 1:])
        )
        if self.end_of_document is None:
            return Inputs(tokens_BS, labels_BS, None)
        positions_BW = document_positions(inputs_BW, self.end_of_document)
        positions_BS = np.concatenate([positions_BW[:, piece] for piece in pieces], axis=1)
        cuts = [document_segments(positions_BW, queries) for queries in self.attends(inputs_BW.shape[1])]
        segments = tuple(
            Segments(to_device(query_ends, device), to_device(key_ends, device), longest)
            for query_ends, key_ends, longest in cuts
        )
        return Inputs(tokens_BS, labels_BS, Documents(to_device(positions_BS, device), segments))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def document_positions(inputs_BW: np.ndarray, end_of_document: int) -> np.ndarray:
    """Position of every token in its document, int64 [B, W]: 0 at the start of a sequence and after the token
    `end_of_document`."""
    index = np.broadcast_to(np.arange(inputs_BW.shape[1]), inputs_BW.shape)
    begins = np.zeros(inputs_BW.shape, dtype=bool)
    begins[:, 1:] = inputs_BW[:, :-1] == end_of_document
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


def document_segments(positions_BW: np.ndarray, queries: range) -> tuple[np.ndarray, np.ndarray, int]:
    """The fields of `Segments`, for queries that are the tokens `queries` of every sequence, and keys that are all
    tokens up to the last of these.

    Counts are rounded up to powers of two, so that compiled code sees few of them.
    """
    num_queries, num_keys = len(queries), queries.stop
    query_ends, key_ends = [0], [0]
    for row, positions_W in enumerate(positions_BW):
        document = queries.start - int(positions_W[queries.start])  # where the first query's own begins
        if document > 0:  # keys that no query sees
            query_ends.append(row * num_queries)
            key_ends.append(row * num_keys + document)
        inside = np.flatnonzero(positions_W[queries.start + 1 : queries.stop] == 0) + queries.start + 1
        for end in (*inside.tolist(), queries.stop):
            query_ends.append(row * num_queries + end - queries.start)
            key_ends.append(row * num_keys + end)
    longest = max(int(np.diff(key_ends).max()), 1)
    padding = _power_of_two(len(key_ends) - 1) + 1 - len(key_ends)
    return (
        np.array(query_ends + query_ends[-1:] * padding, dtype=np.int32),
        np.array(key_ends + key_ends[-1:] * padding, dtype=np.int32),
        _power_of_two(longest),
    )


def _power_of_two(count: int) -> int:
    """The smallest that is not below `count`."""
    return 1 << (count - 1).bit_length()
