"""Weights that FSDP gathers in 8 bits (`precision.float8_all_gather`): a rank casts its shard before the all-gather,
and the product takes what arrives as it is.

FSDP2 asks the local tensor of a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather` by name. Here
they are attributes of that one tensor, so that parameters stay plain DTensors for the optimizer, for checkpoints and
for initialisation. torchao's own way, a tensor subclass around every such weight (torchao/float8/fsdp_utils.py), would
show in all of these.

A cast on shards needs the scale of the whole, so their largest elements are reduced over the shard axis once a step. A
part that tensor parallel has cut has a scale of its own, as without this setting. (torchao's has one for all parts,
which is coarser.) And a weight is rounded to `precision.param_dtype` before it is cast, as it is when 16 bits are
gathered. So nothing that is computed depends on the setting, not in a single bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

DTYPE = torch.float8_e4m3fn
"""Of weights, as torchao's tensorwise recipe has it."""


class Float8Gather:
    """The weights of `projections` on this rank, which FSDP has sharded."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        projections: Collection[nn.Module],
        mm_config: LinearMMConfig,
        group: dist.ProcessGroup,
    ):
        """parts: the roots that FSDP was applied to. group: the ranks of the shard axis."""
        self._group = group
        self._weights = [
            _Weight(parameter, mm_config)
            for parameter in _fsdp_parameters(parts)
            if parameter._module_info.module in projections and parameter._module_info.param_name == "weight"
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the scales those of the weights as they are now. Collective over the shard axis: one all-reduce."""
        shards = [weight.shard for weight in self._weights]
        held = [shard for shard in shards if shard.numel()]  # a rank may be left without rows of a weight
        largest = iter(torch._foreach_norm(held, ord=torch.inf) if held else ())
        none = shards[0].new_zeros(())
        amax_W = torch.stack([next(largest) if shard.numel() else none for shard in shards])
        dist.all_reduce(amax_W, dist.ReduceOp.MAX, group=self._group)
        for weight, amax in zip(self._weights, amax_W.unbind(), strict=True):
            weight.set_scale(amax)


class _Weight:
    """One of them, and what FSDP calls around its all-gather."""

    def __init__(self, parameter: FSDPParam, mm_config: LinearMMConfig):
        self._parameter = parameter
        self._mm_config = mm_config
        self._scale: Tensor | None = None

    @property
    def shard(self) -> Tensor:
        """[rows of this rank, in]: float32, or precision.param_dtype without master weights."""
        return self._parameter._sharded_local_tensor

    @property
    def _dtype(self) -> torch.dtype:
        """That a product computes in."""
        return self._parameter.mp_policy.param_dtype or self.shard.dtype

    def set_scale(self, amax: Tensor) -> None:
        shard = self.shard
        if not hasattr(shard, "fsdp_pre_all_gather"):  # it has been given memory since
            shard.fsdp_pre_all_gather = self._cast  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = self._gathered  # type: ignore[attr-defined]
            self._parameter._init_extensions()
        # Rounding keeps order, so the largest of the rounded ones is the largest one, rounded.
        self._scale = amax_to_scale(amax.to(self._dtype), DTYPE)

    def _cast(
        self, mesh: DeviceMesh, size: torch.Size, stride: Sequence[int], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What this rank gives to the all-gather, and what it keeps for what comes back."""
        assert self._scale is not None
        cast = hp_tensor_and_scale_to_float8(self.shard.to(self._dtype), self._scale, DTYPE)._data
        padded = self._parameter.padded_sharded_param_size  # all ranks give as many rows
        if cast.shape != padded:
            rows = cast.shape[0] if cast.numel() else 0
            whole = torch.zeros(padded, dtype=torch.uint8, device=cast.device).view(DTYPE)
            whole[:rows].copy_(cast[:rows])
            cast = whole
        return (cast,), (self._scale,)

    def _gathered(
        self, outputs: tuple[Tensor], kept: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole weight; into `out`, whose memory is that of `outputs` already, from the second time on."""
        (data,), (scale,) = outputs, kept
        if out is None:
            return Float8TrainingTensor(data, scale, dtype, self._mm_config, GemmInputRole.WEIGHT), (data,)
        whole = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(whole, Float8TrainingTensor)
        whole._scale = scale
        return None


def _fsdp_parameters(parts: Sequence[nn.Module]) -> Iterator[FSDPParam]:
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                # Torch 2.11 and 2.12 have one group a module.
                groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
                for group in groups:
                    yield from group.fsdp_params if group is not None else ()
