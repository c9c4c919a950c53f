"""When and where state is saved: the recipe's `checkpoint` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved, where, and how much of it is kept."""

    interval_steps: int
    """Steps between saves; 0 saves only at the end and when asked to stop."""
    keep_last: int = 2
    """Complete checkpoints that survive pruning; at least 2, because the newest may be torn by a failure."""
    storage: Literal["per_host", "shared"] = "per_host"
    """`per_host`: each host has the folder for itself and the platform merges them (SageMaker's /opt/ml/checkpoints);
    `shared`: one folder that every host sees (FSx for Lustre)."""
    path: str = "checkpoints"
    """Folder under the ml root; `{run_id}` is replaced by the run's id."""
    verify_checksums: bool = True
    """Read every byte of a checkpoint before it is trusted; False checks names and sizes only."""
    export_at_end: bool = False
    """Write the finished model to `<ml root>/model` in Hugging Face format."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.interval_steps < 0:
            problems.append(Problem("checkpoint.interval_steps", f"{self.interval_steps} is negative"))
        if self.keep_last < 2:
            problems.append(
                Problem(
                    "checkpoint.keep_last",
                    f"{self.keep_last} leaves nothing to fall back on while the newest is being written",
                    "use 2 or more",
                )
            )
        if not self.path:
            problems.append(Problem("checkpoint.path", "is empty", "checkpoint.path=checkpoints"))
        if self.path.startswith("/") or ".." in self.path.split("/"):
            problems.append(Problem("checkpoint.path", f"{self.path!r} leaves the ml root"))
        return problems
