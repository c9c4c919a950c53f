"""Ring attention over head-tail pieces (see `context`): keys and values travel, results are merged.

A rank computes on the keys of every rank in turn, its own first. With head and tail pieces each of these is a causal
square or a rectangle without a mask, all of the same work. Partial results are merged by the logarithms of their
normalizers, and in backward every part is computed with the normalizers of the whole, which makes the gradients of the
parts add up to those of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

aten = torch.ops.aten


def ring_attention(
    q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, group: dist.ProcessGroup, *, scale: float | None
) -> Tensor:
    """Causal attention of this rank's head and tail of every sequence to the keys of all ranks, [B, H, S, C]."""
    channels, value_channels = q_BHSC.shape[-1], v_BKSC.shape[-1]
    v_BKSC = F.pad(v_BKSC, (0, channels - value_channels))
    out_BHSC, _ = _ring_attention(q_BHSC, k_BKSC, v_BKSC, group.group_name, scale)
    return out_BHSC[..., :value_channels]


class _Transfer:
    """In flight until `arrived` is called, which gives what came; the host does not wait for a GPU."""

    def __init__(self, group: dist.ProcessGroup, outgoing: Tensor, *, to: int, source: int):
        self._incoming = torch.empty_like(outgoing)
        self._outgoing = outgoing  # its memory is needed until it is sent
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
                dist.P2POp(dist.irecv, self._incoming, group=group, group_peer=source),
            ]
        )

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._incoming


class _Ring:
    """Sends to the next rank what comes from the one before."""

    def __init__(self, group_name: str):
        self.group = _resolve_process_group(group_name)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def send(self, outgoing: Tensor) -> _Transfer:
        return _Transfer(self.group, outgoing, to=(self.rank + 1) % self.size, source=(self.rank - 1) % self.size)

    def part(self, source: int, length: int) -> tuple[slice, slice, bool]:
        """Queries of this rank and keys of rank `source` that see each other, and whether causally."""
        half = length // 2
        if source == self.rank:
            return slice(0, length), slice(0, length), True
        if source < self.rank:  # its head is before both of this rank's pieces, its tail after
            return slice(0, length), slice(0, half), False
        return slice(half, length), slice(0, length), False  # both of its pieces lie between this rank's


@torch.library.custom_op("chimera::ring_attention", mutates_args=())
def _ring_attention(q: Tensor, k: Tensor, v: Tensor, group_name: str, scale: float | None) -> tuple[Tensor, Tensor]:
    ring, length = _Ring(group_name), q.shape[2]
    here = torch.stack((k, v))
    for step in range(ring.size):
        k, v = here
        transfer = ring.send(here) if step < ring.size - 1 else None
        queries, keys, causal = ring.part((ring.rank - step) % ring.size, length)
        part, normalizers = _forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal, scale)
        if step == 0:
            out, log_normalizers = part.float(), normalizers.clone()
        else:
            _merge(out[:, :, queries], log_normalizers[:, :, queries], part, normalizers)
        if transfer is not None:
            here = transfer.arrived()
    return out.to(q.dtype).contiguous(), log_normalizers.contiguous()


def _merge(out: Tensor, log_normalizers: Tensor, part: Tensor, normalizers: Tensor) -> None:
    """Add the `part` over other keys to `out`, in place. A mean of two is weighted by their normalizers."""
    difference = normalizers - log_normalizers
    out += difference.sigmoid()[..., None] * (part - out)
    log_normalizers += F.softplus(difference)


@torch.library.custom_op("chimera::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_normalizers: Tensor,
    group_name: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, length = _Ring(group_name), q.shape[2]
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    here = torch.stack((k, v))
    # The gradient of a rank's keys and values travels with them, and grows at every rank.
    grads = torch.zeros_like(here, dtype=torch.float32)
    grads_transfer: _Transfer | None = None
    for step in range(ring.size):
        k, v = here
        transfer = ring.send(here) if step < ring.size - 1 else None
        queries, keys, causal = ring.part((ring.rank - step) % ring.size, length)
        of_q, of_k, of_v = _backward(
            *(x[:, :, queries] for x in (grad, q)),
            *(x[:, :, keys] for x in (k, v)),
            *(x[:, :, queries] for x in (out, log_normalizers)),
            causal,
            scale,
        )
        grad_q[:, :, queries] += of_q
        if grads_transfer is not None:
            grads = grads_transfer.arrived()
        grads[0][:, :, keys] += of_k
        grads[1][:, :, keys] += of_v
        grads_transfer = ring.send(grads)  # after the last step, to the rank that they belong to
        if transfer is not None:
            here = transfer.arrived()
    assert grads_transfer is not None
    grads = grads_transfer.arrived()
    # An operator may not return two views of one tensor.
    return grad_q.to(q.dtype), grads[0].to(k.dtype, copy=True), grads[1].to(v.dtype, copy=True)


@_ring_attention.register_fake
def _(q, k, v, group_name, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_ring_attention_backward.register_fake
def _(grad, q, k, v, out, log_normalizers, group_name, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_ring_attention_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


_ring_attention.register_autograd(_differentiate, setup_context=_save)
OPERATOR = torch.ops.chimera.ring_attention.default


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output, and the logarithms of the normalizers [B, H, S]; as many queries as keys if `causal`."""
    if q.device.type == "cuda":
        out, log_normalizers, *_ = aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        return out.transpose(1, 2), log_normalizers
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_normalizers: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    if q.device.type == "cuda":
        grads = aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)), log_normalizers.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device),
            scale=scale,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_normalizers.contiguous(), 0.0, causal, scale=scale
    )
