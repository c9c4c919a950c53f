"""One vocabulary of states for all targets."""

from __future__ import annotations

from dataclasses import dataclass

STATES = (
    "queued",
    "provisioning",
    "downloading",
    "running",
    "interrupted",
    "restarting",
    "uploading",
    "completed",
    "failed",
    "stopped",
)
ENDED = frozenset({"completed", "failed", "stopped"})


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """`state` is one of STATES, or, where AWS invents a new one, AWS's own word."""

    state: str
    reason: str = ""
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    exit_code: int | None = None
    needs_resume: bool = False
    """Nothing will move this run on but a resume: what drove it is gone, though it has not ended."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED
