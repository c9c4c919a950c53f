"""What a block keeps for backward, in the host's memory until then.

On a GPU the copies run on streams of their own beside the computation: out while later blocks compute, and back, all
tensors of the next block at once, while backward computes the block before it. Elsewhere they are plain copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..model.local import local

MIN_BYTES = 1 << 20
"""Smaller tensors stay on a GPU: to start a copy of them costs more than their memory is worth."""


class Parked:
    """One tensor of one forward pass."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None):
        self.device = tensor.device
        self._stream = stream
        self._back: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._host = torch.empty_like(
            tensor, device="cpu", memory_format=torch.preserve_format, pin_memory=stream is not None
        )
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not used again before the copy is done

    def fetch(self) -> None:
        """Start to copy back; the host does not wait."""
        if self._back is not None:
            return
        if self._stream is None:
            self._back = self._host.to(self.device)
            return
        with torch.cuda.stream(self._stream):
            self._back = self._host.to(self.device, non_blocking=True)
            self._ready = self._stream.record_event()

    def take(self) -> Tensor:
        self.fetch()
        assert self._back is not None
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
            self._back.record_stream(torch.cuda.current_stream())
        return self._back


class Offload:
    """The parked tensors of every block's forward passes whose backward is still to come."""

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._min_bytes = MIN_BYTES if self._on_gpu else 1
        self._stream: torch.cuda.Stream | None = None
        self._numbers = itertools.count()
        self._passes: dict[int, list[Parked]] = {}

    def apply(self, block: nn.Module) -> None:
        """Wrap the block's forward, outside of checkpointing and compiling: what these keep is what is parked."""
        block.forward = partial(self._forward, block, block.forward)

    def _forward(self, block: nn.Module, forward: Callable, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        if self._on_gpu and self._stream is None:
            self._stream = torch.cuda.Stream()
        # FSDP frees gathered weights and gathers them again by itself. Those gathered in 8 bits are wrappers, without a
        # storage of their own; nothing else that is kept is one.
        whole = [local(p) for p in block.parameters()]
        weights = {w.untyped_storage().data_ptr() for w in whole if not is_traceable_wrapper_subclass(w)}
        parked: dict[Any, Parked] = {}

        def pack(tensor: Tensor) -> Parked | Tensor:
            if is_traceable_wrapper_subclass(tensor):
                return tensor
            large = tensor.numel() * tensor.element_size() >= self._min_bytes
            storage = tensor.untyped_storage()
            if not large or storage.data_ptr() in weights or self._on_gpu != tensor.is_cuda:
                return tensor
            # Several operations keep the same tensor. A reference that outlives its storage never equals another's.
            what = (StorageWeakRef(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if what not in parked:
                parked[what] = Parked(tensor.detach(), self._stream)
            return parked[what]

        def unpack(kept: Parked | Tensor) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            self._prefetch(number)
            return kept.take()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = forward(*args)
        number = next(self._numbers)
        if parked:
            self._passes[number] = list(parked.values())
        return out

    def _prefetch(self, number: int) -> None:
        """On the first use of a pass: fetch all of it, and of the pass before it, whose backward is likely next."""
        if number not in self._passes:
            return
        fetched = self._passes.pop(number)
        before = max((other for other in self._passes if other < number), default=None)
        if before is not None:
            fetched += self._passes[before]
        for tensor in fetched:
            tensor.fetch()
