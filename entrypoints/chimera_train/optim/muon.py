"""Muon: the momentum of a matrix, made orthogonal, is its update; everything else goes by AdamW.

Orthogonalising needs a whole matrix. The ranks of a replica share the matrices out among them; parts of the momentum
travel to the rank that works on the matrix, and parts of the result travel back, so traffic a step is twice the
parameters, and work is split evenly. Replicas do the same work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.local import local
from . import states as storage
from .matrices import Exchange, Matrix, rounds, share_out
from .newton_schulz import orthogonalise
from .rules import ADAMW, Group
from .sharded import Place, ShardedOptimizer

MOMENTUM = "momentum_buffer"


class Muon(ShardedOptimizer):
    """Groups with the key `momentum` hold matrices; of the others, AdamW.

    The update is scaled by 0.2 × sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982, eq. 4), to the size of
    AdamW's, so that both share learning rate and weight decay. The momentum is Nesterov's.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        stacks: dict[nn.Parameter, int],
        **options: Any,
    ):
        """group: the ranks among which parameters are sharded. dtype: of the products and of what travels. stacks: how
        many matrices of equal size stand in a parameter, one below the other; 1 where it is not named. Collective."""
        super().__init__(groups, ADAMW, **options)
        self._group, self._dtype = group, dtype
        self._matrices = [p for g in self.param_groups if "momentum" in g for p in g["params"]]
        mine = [self._places[p] for p in self._matrices]
        self._all_places: list[list[Place]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(self._all_places, mine, group=group)
        self._rounds = self._plan(stacks)

    def _plan(self, stacks: dict[nn.Parameter, int]) -> list[list[list[Matrix]]]:
        """By round, by rank."""
        matrices = []
        for number, parameter in enumerate(self._matrices):
            rows = parameter.shape[0] // stacks.get(parameter, 1)
            matrices += [
                Matrix(number, first, rows, parameter.shape[1]) for first in range(0, parameter.shape[0], rows)
            ]
        by_rank = [rounds(share) for share in share_out(matrices, self._all_places)]
        return [
            [own[number] if number < len(own) else [] for own in by_rank]
            for number in range(max(len(own) for own in by_rank))
        ]

    def states_of(self, group: Group) -> tuple[str, ...]:
        return (MOMENTUM,) if "momentum" in group else super().states_of(group)

    def update_group(self, group: Group) -> None:
        if "momentum" not in group:
            super().update_group(group)
            return
        for parameter in group["params"]:
            self._update_momentum(group, parameter)
        for shares in self._rounds:
            self._update_round(group, shares)

    def _update_momentum(self, group: Group, parameter: nn.Parameter) -> None:
        states = self._state(group, parameter)
        states["step"] += 1
        for rows in self.chunks(parameter):
            grad = local(parameter.grad)[rows].float()
            mean = storage.read(states, MOMENTUM, rows, grad.device).lerp_(grad, 1 - group["momentum"])
            self.store_state(parameter, states, MOMENTUM, int(states["step"]), rows, mean)

    def _update_round(self, group: Group, shares: list[list[Matrix]]) -> None:
        device = local(self._matrices[0]).device
        exchange = Exchange(shares, self._all_places, self._group)

        def direction(matrix: Matrix, place: Place) -> Tensor:
            parameter = self._matrices[matrix.parameter]
            rows = self._rows(parameter, matrix, place.row, place.rows)
            grad = local(parameter.grad)[rows].float()
            return grad.lerp(storage.read(self.state[parameter], MOMENTUM, rows, device), group["momentum"])

        whole = exchange.gather(direction, self._dtype, device)
        _orthogonalise_alike(whole)
        for matrix, update in exchange.scatter(whole, self._dtype, device):
            parameter = self._matrices[matrix.parameter]
            part = matrix.part(self._places[parameter])
            rows = self._rows(parameter, matrix, part.row, part.rows)
            value = local(parameter)[rows].float().mul_(1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(matrix.rows, matrix.columns))
            value.add_(update, alpha=-group["lr"] * scale)
            self.store_parameter(parameter, int(self.state[parameter]["step"]), rows, value)

    def _rows(self, parameter: nn.Parameter, matrix: Matrix, first: int, count: int) -> slice:
        """Of this rank's part of the parameter: rows [first, first + count) of the matrix."""
        start = matrix.first + first - self._places[parameter].row
        return slice(start, start + count)


def _orthogonalise_alike(matrices: list[Tensor]) -> None:
    """In place; those of one shape in one batch."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for alike in by_shape.values():
        for matrix, result in zip(alike, orthogonalise(torch.stack(alike)), strict=True):
            matrix.copy_(result)
