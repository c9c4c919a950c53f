"""Torch's flight recorder: the last collectives of each rank, on disk when a job hangs or loses a peer.

Standard library only: what switches it on must be in the environment before torch loads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from .config import MlRoot

NUM_ENTRIES = 2000
"""Collectives that are remembered; a dump has about 1 KB for each."""


def enable(root: MlRoot) -> None:
    """Set torch's variables, where the user has not."""
    folder = root.flight_recorder
    with contextlib.suppress(OSError):  # then there is no dump, and what the run is for goes on
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(NUM_ENTRIES))
    # NCCL's watchdog writes by itself, before it aborts the process; the rank is appended.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-rank-"))


def dump(root: MlRoot, rank: int) -> Path | None:
    """Write this rank's collectives as JSON, newest last; None where torch has recorded none or the disk refuses."""
    torch = sys.modules.get("torch")
    recorded = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    if recorded is None or not hasattr(recorded, "_dump_fr_trace_json"):
        return None
    path = root.flight_recorder / f"rank-{rank}.json"
    try:
        path.write_bytes(recorded._dump_fr_trace_json())
    except (OSError, RuntimeError, TypeError):
        return None
    return path
