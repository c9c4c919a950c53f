"""Causal attention without a mask in memory where `scaled_dot_product_attention` has no word for it: a window, packed
documents, and queries that are only the last tokens of their sequence (context parallel).

On CUDA it is torch's flash attention, in 16 bits. On a CPU it is the CPU's own flash kernel, called segment by segment.

Shapes, by suffix: B sequences, S queries and T ≥ S keys a sequence, H heads, K heads of keys and values, C channels of
a head, N segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

CPU_QUERIES = 128
"""Queries of one call on a CPU where causal alone does not say which keys they see: a mask has this many rows."""


class Segments(NamedTuple):
    """Where the B × S queries and the B × T keys of a batch, each row after row, are cut: attention stays inside a
    segment, whose queries are the last of its keys' tokens. A segment without queries leaves its keys unseen."""

    query_ends_N: Tensor
    """Int32 [N + 1], ascending from 0 to B × S. The last may repeat: segments without tokens."""
    key_ends_N: Tensor
    """Int32 [N + 1], ascending from 0 to B × T."""
    longest: int
    """No segment has more tokens."""


def flash_attention(
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    segments: Segments | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of the last S of T tokens, [B, H, S, channels of a value].

    Each query sees the keys at its own position and before, at most `window` of them (None: all). `scale` multiplies
    the scores (None: 1 / sqrt(C)). Values may have fewer channels than queries.
    """
    channels, value_channels = q_BHSC.shape[-1], v_BKTC.shape[-1]
    if value_channels < channels:  # the kernels want one width; zeros add nothing
        v_BKTC = F.pad(v_BKTC, (0, channels - value_channels))
    query_ends_N, key_ends_N, longest = segments or (None, None, k_BKTC.shape[2])
    out_BHSC, _ = _flash_attention(q_BHSC, k_BKTC, v_BKTC, query_ends_N, key_ends_N, longest, window, scale)
    return out_BHSC[..., :value_channels]


@torch.library.custom_op("chimera::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor | None,
    key_ends: Tensor | None,
    longest: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """One operator, so that compiled blocks and selective checkpointing see one. Returns the output and, for the
    backward pass, the logarithms of the softmax's normalizers, [B, H, S] or with segments [H, B × S]."""
    out, log_normalizers = _empty_forward(q, query_ends)
    if q.device.type == "cuda":
        packed_q, packed_k, packed_v = (_cuda_layout(x, query_ends) for x in (q, k, v))
        found, log_normalizers, *_ = aten._flash_attention_forward(
            packed_q,
            packed_k,
            packed_v,
            query_ends,
            key_ends,
            min(longest, q.shape[2]),
            min(longest, k.shape[2]),
            0.0,
            window is None,
            False,
            scale=scale,
            **_cuda_window(window),
        )
        out.copy_(found.view(q.shape[0], q.shape[2], *found.shape[-2:]).transpose(1, 2))
        return out, log_normalizers
    for call in _cpu_calls(q, k, query_ends, key_ends, window):
        part, normalizers = aten._scaled_dot_product_flash_attention_for_cpu(
            q[call.queries], k[call.keys], v[call.keys], 0.0, call.mask is None, attn_mask=call.mask, scale=scale
        )
        out[call.queries] = part
        log_normalizers[call.normalizers] = normalizers.view_as(log_normalizers[call.normalizers])
    return out, log_normalizers


@torch.library.custom_op("chimera::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_normalizers: Tensor,
    query_ends: Tensor | None,
    key_ends: Tensor | None,
    longest: int,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cuda":
        packed = [_cuda_layout(x, query_ends) for x in (grad, q, k, v, out)]
        grads = aten._flash_attention_backward(
            *packed,
            log_normalizers,
            query_ends,
            key_ends,
            min(longest, q.shape[2]),
            min(longest, k.shape[2]),
            0.0,
            window is None,
            # State of the dropout's random numbers, of which there are none.
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
            scale=scale,
            **_cuda_window(window),
        )
        grad_q, grad_k, grad_v = (
            found.view(x.shape[0], x.shape[2], *found.shape[-2:]).transpose(1, 2).contiguous()
            for found, x in zip(grads, (q, k, v), strict=True)
        )
        return grad_q, grad_k, grad_v
    # Summed over calls in float32: in bfloat16 the small ones would be lost.
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    for call in _cpu_calls(q, k, query_ends, key_ends, window):
        queries, keys = call.queries, call.keys
        normalizers = log_normalizers[call.normalizers].view(q[queries].shape[:-1])
        of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[queries], q[queries], k[keys], v[keys], out[queries], normalizers, 0.0, call.mask is None,
            attn_mask=call.mask, scale=scale,
        )  # fmt: skip
        grad_q[queries] = of_q
        grad_k[keys] += of_k
        grad_v[keys] += of_v
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _empty_forward(q: Tensor, query_ends: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, length, channels = q.shape
    # Heads of one token side by side, as the projection after it wants them.
    out = q.new_empty(batch, length, heads, channels).transpose(1, 2)
    shape = (batch, heads, length) if query_ends is None else (heads, batch * length)
    return out, q.new_empty(shape, dtype=torch.float32)


@_flash_attention.register_fake
def _(q, k, v, query_ends, key_ends, longest, window, scale):
    return _empty_forward(q, query_ends)


@_flash_attention_backward.register_fake
def _(grad, q, k, v, out, log_normalizers, query_ends, key_ends, longest, window, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_ends, key_ends, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, query_ends, key_ends)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _flash_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None, None


_flash_attention.register_autograd(_differentiate, setup_context=_save)
OPERATOR = torch.ops.chimera.flash_attention.default


def _cuda_layout(x_BHSC: Tensor, query_ends: Tensor | None) -> Tensor:
    """The kernel's order: [B, S, H, C], or with segments [B × S, H, C]."""
    x_BSHC = x_BHSC.transpose(1, 2)
    return x_BSHC if query_ends is None else x_BSHC.flatten(0, 1)


def _cuda_window(window: int | None) -> dict[str, int]:
    """The kernel counts the keys beside a query's own on either side."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@dataclass(frozen=True)
class _CpuCall:
    """Of the CPU's kernel. Without a mask it is causal, with as many queries as keys."""

    queries: tuple[slice, ...]
    """Of q, [B, H, S, C]."""
    keys: tuple[slice, ...]
    """Of k and v, [B, K, T, C]."""
    normalizers: tuple[slice, ...]
    mask: Tensor | None


def _cpu_calls(
    q: Tensor, k: Tensor, query_ends: Tensor | None, key_ends: Tensor | None, window: int | None
) -> Iterator[_CpuCall]:
    length, key_length, everything = q.shape[2], k.shape[2], slice(None)
    if query_ends is None or key_ends is None:
        for queries, keys, mask in _blocks(length, key_length, window, q.dtype):
            yield _CpuCall((everything, everything, queries), (everything, everything, keys), (..., queries), mask)
        return
    borders = torch.stack((query_ends, key_ends), dim=1).tolist()
    for (query_start, key_start), (query_end, key_end) in itertools.pairwise(borders):
        if query_start == query_end:
            continue
        row = query_start // length
        for queries, keys, mask in _blocks(query_end - query_start, key_end - key_start, window, q.dtype):
            first_query, first_key = query_start - row * length, key_start - row * key_length
            yield _CpuCall(
                (slice(row, row + 1), everything, _moved(queries, first_query)),
                (slice(row, row + 1), everything, _moved(keys, first_key)),
                (everything, _moved(queries, query_start)),
                mask,
            )


def _moved(positions: slice, by: int) -> slice:
    return slice(positions.start + by, positions.stop + by)


def _blocks(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the range of keys that some of them see, and which see which; the queries are the last of the keys."""
    if num_queries == num_keys and (window is None or window >= num_keys):
        yield slice(0, num_queries), slice(0, num_keys), None
        return
    before = num_keys - num_queries
    for start in range(0, num_queries, CPU_QUERIES):
        stop = min(start + CPU_QUERIES, num_queries)
        first_key = 0 if window is None else max(0, before + start - window + 1)
        queries = torch.arange(before + start, before + stop)[:, None]
        keys = torch.arange(first_key, before + stop)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        yield slice(start, stop), slice(first_key, before + stop), mask
