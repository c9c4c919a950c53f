"""What a target is: it renders a plan to exact bytes, submits them, and answers for the run afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from chimera_sm.aws.bundle import Bundle
from chimera_sm.planner.types import Plan
from chimera_sm.runs.record import RunRecord
from chimera_sm.runs.status import RunStatus


@dataclass(frozen=True)
class Placeholder:
    """A value of the team's account that is missing offline. What stands in the artefacts satisfies AWS's patterns,
    and submit refuses it."""

    key: str
    """Recipe key that would set it, e.g. `env.role_arn`."""
    value: str
    fix: str


@dataclass(frozen=True)
class Artifacts:
    """The exact bytes that would be sent, by file name. The same recipe, code and run id give the same bytes."""

    run_id: str
    target: str
    files: Mapping[str, bytes]
    bundle: Bundle
    placeholders: tuple[Placeholder, ...] = field(default=())

    @property
    def sha256(self) -> str:
        """Over names and bytes of all files, in the order of the names."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(f"{name}\0{len(self.files[name])}\0".encode())
            digest.update(self.files[name])
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has to say."""

    id: str
    """Of the rule, e.g. `offline.memory_fits`."""
    severity: Literal["error", "warning", "info"]
    message: str
    where: str
    """Recipe key."""
    fix: str = ""
    """What to type instead."""
    blocks_submit: bool = False
    """A dry run may show it; submit refuses it. Errors always block."""


@dataclass(frozen=True)
class ModelFiles:
    """Where, on this machine, a run's model can be read from."""

    checkpoints: Path
    """Folder of the `step-…` folders of all hosts."""
    recipe: Path
    """The `recipe.json` that it was trained with."""
    tokenizer: Path | None
    """`tokenizer.json` of the shards; None where they are not at hand."""


class Target(Protocol):
    """Where a run runs. Nothing but `submit`, `status`, `logs`, `stop` and `resume` may open a socket."""

    name: str
    request_file: str
    """The artefact that is the request itself: what `launch --dry-run --json` prints."""
    poll_s: float
    """How often a status may be asked for: AWS throttles those who ask each second."""

    def render(self, plan: Plan, run_id: str) -> Artifacts: ...

    def ready(self, plan: Plan) -> list[str]:
        """What is missing on this side for a submit (credentials, packages), in words; empty when nothing is."""
        ...

    def submit(self, plan: Plan, artifacts: Artifacts, record: RunRecord) -> None:
        """Start the run. Idempotent for one run id."""
        ...

    def status(self, record: RunRecord) -> RunStatus: ...

    def logs(self, record: RunRecord, *, follow: bool = False) -> Iterator[str]: ...

    def metrics(self, record: RunRecord) -> list[dict[str, Any]]:
        """One dict a logged step: `step` and what the metric table names."""
        ...

    def model_files(self, record: RunRecord) -> ModelFiles:
        """Files of the run's model on this machine. Raises UsageError when they are elsewhere, and says where."""
        ...

    def stop(self, record: RunRecord) -> None:
        """Ask the run to save and stop. No-op on a run that has ended."""
        ...

    def saved_step(self, record: RunRecord) -> int | None:
        """Step of the newest complete checkpoint; None where there is none, or where this machine cannot see it."""
        ...

    def amend(self, record: RunRecord, artifacts: Artifacts, lock: Mapping[str, Any]) -> None:
        """Record another recipe for the resume that follows. Raises UsageError where the run cannot go on, or cannot
        go on with another recipe; nothing is changed then."""
        ...

    def resume(self, record: RunRecord) -> None:
        """Go on from the newest complete checkpoint."""
        ...
