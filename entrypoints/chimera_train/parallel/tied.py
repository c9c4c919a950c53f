"""A tied embedding in a pipeline: the first stage owns the matrix, the last one computes with a copy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import MeshLayout
from ..model.local import local
from ..model.parts import ModelParts


class TiedEmbedding:
    """Collective over the pipeline axis. Both ranks shard the matrix alike, so each exchanges just its shard. Where the
    model is not tied there is neither, and nothing is done.

    The copy is refreshed at the start of a step: the last stage has nothing to do yet, and whatever has changed the
    weights since (the optimizer, a checkpoint) is in it.
    """

    def __init__(self, parts: ModelParts, layout: MeshLayout, group: dist.ProcessGroup):
        self._owner, self._holder = layout.rank_of_stage(0), layout.rank_of_stage(layout.num_stages - 1)
        self._group = group
        owned = parts.embedding if parts.config.tie_embeddings else None
        self._weight = None if owned is None else owned.weight
        self._copy = parts.tied_copy
        self._sent: dist.Work | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copy equal to the matrix. The owner does not wait; see `wait`."""
        if self._weight is not None and self._copy is not None:
            local(self._copy).copy_(local(self._weight))
        elif self._weight is not None:
            self._sent = self._send(local(self._weight), self._holder)
        elif self._copy is not None:
            self._receive(local(self._copy), self._owner)

    def wait(self) -> None:
        """Until the matrix has been sent. Before it changes again."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the gradient of the copy to the matrix's own, and clear it."""
        if self._weight is not None and self._copy is not None:
            _gradient(self._weight).add_(_gradient(self._copy))
        elif self._weight is not None:
            own = _gradient(self._weight)
            received = torch.empty_like(own)
            self._receive(received, self._holder)
            own.add_(received)
        elif self._copy is not None:
            sent = self._send(_gradient(self._copy), self._owner)
            if sent is not None:
                sent.wait()
        if self._copy is not None:
            self._copy.grad = None

    # A shard without rows is without rows on both ends, and is not sent.

    def _send(self, shard: Tensor, to: int) -> dist.Work | None:
        return dist.isend(shard, group=self._group, group_dst=to) if shard.numel() else None

    def _receive(self, shard: Tensor, source: int) -> None:
        if shard.numel():
            dist.recv(shard, group=self._group, group_src=source)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)
