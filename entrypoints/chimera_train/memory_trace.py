"""What torch's allocator would be asked for: every storage that comes to be under a dispatch mode, and when it goes."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS = "activations and buffers"
GATHERED = "gathered parameters"


@dataclass
class _Span:
    """Memory of one storage at one size, from one moment to another; a moment is a count of events."""

    size: int
    begin: int
    end: int | None = None
    kind: str = ACTIVATIONS


class MemoryTrace(TorchDispatchMode):
    """Bytes of all tensors that operations make, by time and kind. Meta tensors have none.

    FSDP frees and takes gathered parameters by resizing their storages, which no operation sees, so that is watched as
    well: what is resized is of the kind `GATHERED`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._live = 0
        self._peak = 0
        self._peak_at = 0
        self._spans: list[_Span] = []
        self._memory: weakref.WeakKeyDictionary[torch.UntypedStorage, list[_Span]] = weakref.WeakKeyDictionary()
        """A storage's sizes so far; the last is the present one."""

    def __enter__(self) -> MemoryTrace:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            done = self._resize(storage, size)
            self._resized(storage)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are; their storages were seen, or are from now on."""
        for tensor in tensors:
            span = self._see(tensor)
            if span is not None:
                span.kind = kind

    def forget_peak(self) -> None:
        self._peak, self._peak_at = self._live, self._now

    def at_peak(self) -> dict[str, int]:
        """Kind → bytes at the moment of the peak since `forget_peak`."""
        found: dict[str, int] = defaultdict(int)
        for span in self._spans:
            if span.begin <= self._peak_at and (span.end is None or span.end > self._peak_at):
                found[span.kind] += span.size
        return dict(found)

    def _see(self, tensor: Tensor) -> _Span | None:
        while isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage)
        if memory is None:
            memory = self._memory[storage] = [self._begin(storage.nbytes(), ACTIVATIONS)]
            weakref.finalize(storage, self._end, memory)
        return memory[-1]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        memory = self._memory.get(storage)
        if memory is not None and memory[-1].size != storage.nbytes():
            self._end(memory)
            memory.append(self._begin(storage.nbytes(), GATHERED))

    def _begin(self, size: int, kind: str) -> _Span:
        self._now += 1
        span = _Span(size, self._now, kind=kind)
        self._spans.append(span)
        self._live += size
        if self._live > self._peak:
            self._peak, self._peak_at = self._live, self._now
        return span

    def _end(self, memory: list[_Span]) -> None:
        self._now += 1
        memory[-1].end = self._now
        self._live -= memory[-1].size
