"""An optimizer for what torch's fused ones cannot do: states of fewer bits or on the host, bfloat16 parameters, Lion.

Every rank updates its own shard in float32, some rows at a time, so that float32 copies never stand whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.optim import StateDtype
from ..model.local import local
from ..model.shards import own_box
from . import states as storage
from .rounding import key_of, random_bits, round_stochastically
from .rules import Group, Rule

CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole of it: rows [row, row + rows) and columns alike."""

    row: int
    column: int
    rows: int
    columns: int


def place_of(parameter: Tensor) -> Place:
    """Of this rank's part. A vector is a matrix of one column."""
    box, offset = own_box(parameter)
    shape = tuple(box.shape)
    if 0 in shape:
        return Place(0, 0, 0, 0)
    if len(shape) == 1:
        return Place(offset[0], 0, shape[0], 1)
    return Place(offset[0], offset[1], *shape)


class ShardedOptimizer(torch.optim.Optimizer):
    """`rule` on every parameter. Parameters and their gradients are plain tensors or DTensors, of one or two
    dimensions, float32 or bfloat16; bfloat16 is rounded stochastically, and so are bfloat16 states."""

    def __init__(
        self,
        groups: list[Group],
        rule: Rule,
        *,
        names: dict[nn.Parameter, str],
        seed: int,
        state_dtype: StateDtype,
        on_host: bool,
        defaults: dict[str, Any],
    ):
        super().__init__(groups, defaults)
        self.rule = rule
        self._names = names
        self._seed = seed
        self._state_dtype = state_dtype
        self._on_host = on_host
        self._places = {p: place_of(p) for group in self.param_groups for p in group["params"]}

    def states_of(self, group: Group) -> tuple[str, ...]:
        """Names of what is kept of a parameter of this group."""
        return self.rule.states

    @torch.no_grad()
    def allocate(self) -> None:
        """Make the states of all parameters, as they are before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state(group, parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self.update_group(group)
        if self._on_host and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a checkpoint reads the states from the host's memory

    def update_group(self, group: Group) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            states = self._state(group, parameter)
            states["step"] += 1
            step = int(states["step"])
            for rows in self.chunks(parameter):
                self._update_rows(group, parameter, states, step, rows)

    def _update_rows(
        self, group: Group, parameter: nn.Parameter, states: dict[str, Tensor], step: int, rows: slice
    ) -> None:
        value, grad = local(parameter)[rows].float(), local(parameter.grad)[rows].float()
        read = {name: storage.read(states, name, rows, value.device) for name in self.rule.states}
        self.rule.update(value, grad, read, step, group)
        for name, state in read.items():
            self.store_state(parameter, states, name, step, rows, state)
        self.store_parameter(parameter, step, rows, value)

    def chunks(self, parameter: nn.Parameter) -> Iterator[slice]:
        """This rank's rows, some at a time."""
        place = self._places[parameter]
        at_once = max(1, CHUNK_ELEMENTS // max(1, place.columns))
        return (slice(start, min(start + at_once, place.rows)) for start in range(0, place.rows, at_once))

    def store_parameter(self, parameter: nn.Parameter, step: int, rows: slice, value: Tensor) -> None:
        target = local(parameter)[rows]
        if target.dtype == torch.bfloat16:
            target.copy_(round_stochastically(value, self._bits(parameter, "parameter", step, rows, value)))
        # else `value` is the parameter's own storage

    def store_state(
        self, parameter: nn.Parameter, states: dict[str, Tensor], name: str, step: int, rows: slice, value: Tensor
    ) -> None:
        rounds = states[name].dtype == torch.bfloat16
        bits = self._bits(parameter, name, step, rows, value) if rounds else None
        storage.write(states, name, rows, value, bits)

    def _bits(self, parameter: nn.Parameter, what: str, step: int, rows: slice, like: Tensor) -> Tensor:
        place = self._places[parameter]
        key = key_of(self._seed, self._names[parameter], what, step)
        shape = (rows.stop - rows.start, place.columns)
        return random_bits(key, shape, (place.row + rows.start, place.column), like.device).view_as(like)

    def _state(self, group: Group, parameter: nn.Parameter) -> dict[str, Tensor]:
        states = self.state[parameter]
        if not states:
            states["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # the host needs it in every step
            for name in self.states_of(group):
                states |= storage.allocate(parameter, name, self._state_dtype, on_host=self._on_host)
        return states
