"""Checkpoints that survive: written once, committed last, read only when complete.

`CheckpointStore`, `LoopState` and the errors need the standard library alone; `Checkpointer` loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, HistoryUnreadable
from .manifest import LoopState, Manifest
from .store import CheckpointStore

if TYPE_CHECKING:
    from .checkpointer import Checkpointer

__all__ = ["CheckpointError", "CheckpointStore", "Checkpointer", "HistoryUnreadable", "LoopState", "Manifest"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from .checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
