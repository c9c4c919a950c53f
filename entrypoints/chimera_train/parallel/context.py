"""Context parallel: the ranks of a group share every sequence, and attention alone communicates.

A sequence is cut into 2 × n pieces for n ranks, and rank r holds pieces r and 2n - 1 - r: a query sees all keys before
it, so a head and a tail together are the same work on every rank (zigzag order, as in Megatron-LM and Llama 3, arXiv
2407.21783, §3.3.2). Three ways to bring queries and keys together, of the same result:

all_gather: every rank gathers all keys and values. Few heads of keys and values make them small, and one collective of
any number of heads does it.
ulysses: an all-to-all gives every rank the whole sequence for its share of the heads, and another takes the result back
(DeepSpeed Ulysses, arXiv 2309.14509). Heads must divide by the ranks.
ring: keys and values travel from rank to rank while each computes on those it has (Ring Attention, arXiv 2310.01889).
No rank ever holds the keys of more than two.

Shapes, by suffix: B sequences, S tokens of a sequence on this rank, W of the whole one, H heads, K heads of keys and
values, C channels of a head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ..config.parallel import ContextBackend
from ..model import Decoder
from ..model.attention_core import CausalAttention
from ..model.flash import Segments, flash_attention
from ..model.sequence import WholeSequence
from .collectives import gather
from .meshes import Meshes
from .ring import ring_attention


class HeadTail(WholeSequence):
    """Pieces `rank` and 2 × `size` - 1 - `rank` of every sequence."""

    def __init__(self, group: dist.ProcessGroup, whole_attention: bool):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.whole_attention = whole_attention

    def pieces(self, length: int) -> list[range]:
        piece = length // (2 * self.size)
        return [range(n * piece, (n + 1) * piece) for n in (self.rank, 2 * self.size - 1 - self.rank)]

    def positions(self, length: int, device: torch.device) -> Tensor:
        pieces = self.pieces(length * self.size)
        return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])

    def attends(self, length: int) -> list[range]:
        return [range(length)] if self.whole_attention else self.pieces(length)


class _SharedAttention(CausalAttention):
    """In the place of `core`, over the ranks of `group`."""

    def __init__(self, core: CausalAttention, group: dist.ProcessGroup):
        super().__init__(core.window, core.scale)
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)


class AllGatherAttention(_SharedAttention):
    def forward(
        self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        channels = [k_BKSC.shape[-1], v_BKSC.shape[-1]]
        gathered = gather(torch.cat((k_BKSC, v_BKSC), dim=-1)[None], 0, self.group)
        k_BKWC, v_BKWC = in_order(gathered, dim=3).split(channels, dim=-1)
        piece = q_BHSC.shape[2] // 2
        ends = [(number + 1) * piece for number in (self.rank, 2 * self.size - 1 - self.rank)]
        parts = [
            flash_attention(queries, k_BKWC[:, :, :end], v_BKWC[:, :, :end], cut, window=self.window, scale=self.scale)
            for queries, end, cut in zip(q_BHSC.chunk(2, dim=2), ends, segments or (None, None), strict=True)
        ]
        return torch.cat(parts, dim=2)


class UlyssesAttention(_SharedAttention):
    def forward(
        self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        channels, value_channels = q_BHSC.shape[-1], v_BKSC.shape[-1]
        v_BKSC = F.pad(v_BKSC, (0, channels - value_channels))
        # By receiving rank: its queries, keys and values in one exchange.
        shares = [x.unflatten(1, (self.size, -1)) for x in (q_BHSC, k_BKSC, v_BKSC)]
        heads = [x.shape[2] for x in shares]
        sent = torch.cat(shares, dim=2).movedim(1, 0)
        q, k, v = in_order(self._exchange(sent), dim=3).split(heads, dim=1)
        out_BHWC = super().forward(q, k, v[..., :value_channels], segments)
        back = self._exchange(out_of_order(out_BHWC, self.size, dim=2))
        return back.movedim(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """The n-th of dimension 0 goes to the n-th rank, and comes back by rank of origin."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class RingAttention(_SharedAttention):
    def forward(
        self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, segments: tuple[Segments, ...] | None = None
    ) -> Tensor:
        # The recipe's rules refuse both.
        assert segments is None
        assert self.window is None
        return ring_attention(q_BHSC, k_BKSC, v_BKSC, self.group, scale=self.scale)


_BACKENDS: dict[ContextBackend, type[_SharedAttention]] = {
    "all_gather": AllGatherAttention,
    "ulysses": UlyssesAttention,
    "ring": RingAttention,
}


def in_order(gathered: Tensor, dim: int) -> Tensor:
    """Head-tail pieces by rank, [ranks, …, S, …] with S at `dim`, as whole sequences: […, W, …], W at `dim` - 1."""
    heads, tails = gathered.chunk(2, dim=dim)
    # Piece after piece: the heads by rank, then the tails from the last rank back.
    return torch.cat((*heads.unbind(0), *reversed(tails.unbind(0))), dim=dim - 1)


def out_of_order(whole: Tensor, size: int, dim: int) -> Tensor:
    """The inverse of `in_order`: whole sequences, W at `dim`, as [ranks, …, S, …]."""
    pieces = whole.chunk(2 * size, dim=dim)
    return torch.stack([torch.cat((pieces[r], pieces[2 * size - 1 - r]), dim=dim) for r in range(size)])


def apply_context_parallel(model: Decoder, backend: ContextBackend, meshes: Meshes) -> None:
    """Put the core of the backend in every block, and this rank's pieces as what the model is fed. In place."""
    if meshes.layout.context == 1:
        return
    group = meshes.group("context")
    model.sequence = HeadTail(group, whole_attention=backend == "ulysses")
    for block in model.layers.values():
        block.attention.core = _BACKENDS[backend](block.attention.core, group)
