"""What an optimizer keeps of a parameter, in float32, in bfloat16, or in 8 bits with a scale a block.

A state has the shape and the sharding of its parameter, so a checkpoint reshards it like one. 8-bit states follow
block-wise dynamic quantisation (arXiv 2110.02861): the code's values lie densest at zero, and each block is scaled by
its largest magnitude. A block is a part of one row, so that a shard of rows holds whole blocks.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ..config.optim import QUANTISATION_BLOCK, StateDtype
from ..model.local import local
from .rounding import round_stochastically

SCALE = "_scale"
"""Suffix of the name of an 8-bit state's scales."""
UNSIGNED = frozenset({"exp_avg_sq"})
"""States that are never negative: their code has no use for a sign."""


def allocate(parameter: Tensor, name: str, dtype: StateDtype, *, on_host: bool) -> dict[str, Tensor]:
    """Zeros for the state `name`; of an 8-bit state, its scales too. Vectors are float32 always: they are few."""
    if parameter.ndim < 2 or dtype == "float32":
        return {name: _zeros(parameter, tuple(parameter.shape), torch.float32, on_host)}
    if dtype == "bfloat16":
        return {name: _zeros(parameter, tuple(parameter.shape), torch.bfloat16, on_host)}
    blocks = -(-parameter.shape[-1] // QUANTISATION_BLOCK)
    return {
        name: _zeros(parameter, tuple(parameter.shape), torch.uint8, on_host),
        name + SCALE: _zeros(parameter, (*parameter.shape[:-1], blocks), torch.float32, on_host),
    }


def _zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, on_host: bool) -> Tensor:
    """Of the global `shape`, sharded as `like` is."""
    mine = local(like)
    blocks = -(-mine.shape[-1] * shape[-1] // like.shape[-1]) if like.shape[-1] else 0
    part = torch.zeros(
        (*mine.shape[:-1], blocks),
        dtype=dtype,
        device="cpu" if on_host else mine.device,
        pin_memory=on_host and mine.device.type == "cuda",
    )
    if not isinstance(like, DTensor):
        return part
    whole = torch.empty(shape, dtype=dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), dtype)
    # DTensor.from_local would move a part on the host to the mesh's device.
    return DTensor(part, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)


def read(states: dict[str, Tensor], name: str, rows: slice, device: torch.device) -> Tensor:
    """This rank's rows of a state in float32, on `device`. Of a float32 state there, the storage itself."""
    stored = local(states[name])[rows].to(device, non_blocking=True)
    if stored.dtype != torch.uint8:
        return stored.float()
    scales = local(states[name + SCALE])[rows].to(device, non_blocking=True)
    values = _code(name in UNSIGNED, device)[stored.int()]
    return values * scales.repeat_interleave(QUANTISATION_BLOCK, dim=-1)[..., : values.shape[-1]]


def write(states: dict[str, Tensor], name: str, rows: slice, value: Tensor, bits: Tensor | None) -> None:
    """Store what `read` gave and a rule has changed. `bits`: random ones of its shape, for bfloat16."""
    target = local(states[name])[rows]
    if target.data_ptr() == value.data_ptr():
        return
    if target.dtype == torch.bfloat16:
        assert bits is not None
        value = round_stochastically(value, bits)
    elif target.dtype == torch.uint8:
        value, scales = _quantise(value, name in UNSIGNED)
        local(states[name + SCALE])[rows].copy_(scales, non_blocking=True)
    target.copy_(value, non_blocking=True)


def _quantise(value: Tensor, unsigned: bool) -> tuple[Tensor, Tensor]:
    columns = value.shape[-1]
    blocks = F.pad(value, (0, -columns % QUANTISATION_BLOCK)).unflatten(-1, (-1, QUANTISATION_BLOCK))
    scales = blocks.abs().amax(dim=-1)
    shares = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).flatten(-2)[..., :columns]
    code = _code(unsigned, value.device)
    return torch.bucketize(shares.contiguous(), (code[1:] + code[:-1]) / 2).to(torch.uint8), scales


@functools.cache
def _code(unsigned: bool, device: torch.device) -> Tensor:
    """The 256 values of the code, ascending: decade i of seven below 1 is cut evenly into 2^i parts for each sign (or
    2^(i + 1) where there is no sign), each stood for by its middle; besides them, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + 1) if unsigned else 2**decade
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        values += middles if unsigned else [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(values), device=device)
