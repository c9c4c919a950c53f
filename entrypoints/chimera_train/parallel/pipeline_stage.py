"""A pipeline stage that has memory for what it receives only while a micro-batch needs it.

torch's own keeps two buffers of hidden states for every micro-batch of a step, for all of the run: at 64 micro-batches
of a 70B model with tensor parallel 8, two gigabytes a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

FREES_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Between the two parts of a split backward, this torch lets go of Functions that the second part needs."""


class OnDemandStage(PipelineStage):
    """Between its uses a buffer is a tensor on the meta device: shape and type, no memory. Whoever still needs what was
    received (autograd, the weights' part of a split backward) holds it himself."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._graphs: dict[int, list[torch.Tensor]] = {}
        """By micro-batch whose weights have no gradient yet: what holds its graph."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Of torch before 2.13: a first message to every neighbour. A rank that is its own sends itself none."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            _move(infos, "meta")
        return prepared

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _move(infos, "meta")
        return prepared

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        if FREES_GRAPHS and not full_backward:
            outputs = self.fwd_cache[bwd_chunk_id][0]
            self._graphs[bwd_chunk_id] = [x.view_as(x) for x in outputs if x.requires_grad]
        super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), "meta")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._graphs.pop(bwd_chunk_id, None)


def _move(infos: tuple[Any, ...], device: torch.device | str) -> None:
    """A new buffer on `device`, with nothing in it, in the place of every one."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # a first stage receives nothing
        if buffer is not None:
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
