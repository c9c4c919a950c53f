"""Whole matrices of sharded parameters, each on one rank, and back: who works on which, and what travels.

Every rank knows the places of all ranks' parts, so all of them make the same plan without talking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .sharded import Place

ROUND_ELEMENTS = 1 << 27
"""Of whole matrices that a rank holds at one time; one matrix at least."""


@dataclass(frozen=True)
class Matrix:
    """Rows [first, first + rows) of parameter number `parameter`: all of it, or one expert of a stack."""

    parameter: int
    first: int
    rows: int
    columns: int

    def part(self, place: Place) -> Place:
        """What a rank whose part of the parameter lies at `place` holds; rows and columns are counted from the
        matrix's own first."""
        start, stop = max(place.row, self.first), min(place.row + place.rows, self.first + self.rows)
        return Place(start - self.first, place.column, max(0, stop - start), place.columns)

    def whole_at(self, place: Place) -> bool:
        part = self.part(place)
        return part.rows == self.rows and part.columns == self.columns

    @property
    def cost(self) -> int:
        """In proportion to the multiplications of its orthogonalisation."""
        return self.rows * self.columns * min(self.rows, self.columns)


def share_out(matrices: list[Matrix], places: list[list[Place]]) -> list[list[Matrix]]:
    """Matrices by the rank that works on them. `places`: by rank, by parameter.

    The most expensive first, each to the least loaded rank; where ranks hold it whole, to one of those, and nothing
    has to travel.
    """
    load = [0] * len(places)
    shares: list[list[Matrix]] = [[] for _ in places]
    for matrix in sorted(matrices, key=lambda m: -m.cost):
        holders = [rank for rank, held in enumerate(places) if matrix.whole_at(held[matrix.parameter])]
        owner = min(holders or range(len(places)), key=lambda rank: load[rank])
        load[owner] += matrix.cost
        shares[owner].append(matrix)
    return shares


def rounds(share: list[Matrix]) -> list[list[Matrix]]:
    """One rank's matrices, so many at a time as ROUND_ELEMENTS allows."""
    cut: list[list[Matrix]] = []
    room = 0
    for matrix in share:
        room -= matrix.rows * matrix.columns
        if room < 0 or not cut:
            cut.append([])
            room = ROUND_ELEMENTS - matrix.rows * matrix.columns
        cut[-1].append(matrix)
    return cut


class Exchange:
    """One round: parts to the ranks that work on them, and results back to the parts."""

    def __init__(self, shares: list[list[Matrix]], places: list[list[Place]], group: dist.ProcessGroup):
        rank = dist.get_rank(group)
        self._group = group
        self._mine = shares[rank]
        self._outgoing = [[m.part(places[rank][m.parameter]) for m in share] for share in shares]
        """My parts, by owner."""
        self._incoming = [[m.part(held[m.parameter]) for m in self._mine] for held in places]
        """Parts of my matrices, by holder."""
        self._shares = shares

    def gather(self, part: Callable[[Matrix, Place], Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """My matrices, whole. `part` gives this rank's part of a matrix, of the place's shape."""
        pieces = [
            part(matrix, place).to(dtype).flatten()
            for share, places in zip(self._shares, self._outgoing, strict=True)
            for matrix, place in zip(share, places, strict=True)
            if place.rows
        ]
        received = self._travel(pieces, self._outgoing, self._incoming, dtype, device)
        whole = [torch.empty(m.rows, m.columns, dtype=dtype, device=device) for m in self._mine]
        for parts, places in zip(received, self._incoming, strict=True):
            for matrix, piece, place in zip(whole, parts, places, strict=True):
                _window(matrix, place).copy_(piece)
        return whole

    def scatter(self, whole: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[tuple[Matrix, Tensor]]:
        """The results of my parts, of all matrices of the round that I hold a part of."""
        pieces = [
            _window(matrix, place).flatten()
            for places in self._incoming
            for matrix, place in zip(whole, places, strict=True)
            if place.rows
        ]
        received = self._travel(pieces, self._incoming, self._outgoing, dtype, device)
        return [
            (matrix, piece)
            for share, parts in zip(self._shares, received, strict=True)
            for matrix, piece in zip(share, parts, strict=True)
            if piece.numel()
        ]

    def _travel(
        self,
        pieces: list[Tensor],
        sent: list[list[Place]],
        received: list[list[Place]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[list[Tensor]]:
        """`pieces` in the order of `sent`, by rank; back come those of `received`, by rank."""
        out_sizes = [sum(p.rows * p.columns for p in places) for places in sent]
        in_sizes = [sum(p.rows * p.columns for p in places) for places in received]
        outgoing = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
        incoming = torch.empty(sum(in_sizes), dtype=dtype, device=device)
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=self._group)
        parts = iter(incoming.split([p.rows * p.columns for places in received for p in places]))
        return [[next(parts).view(p.rows, p.columns) for p in places] for places in received]


def _window(matrix: Tensor, place: Place) -> Tensor:
    return matrix[place.row : place.row + place.rows, place.column : place.column + place.columns]
