"""Which training jobs a run has had: a file in the run's record, written before each is created."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from chimera_sm.runs.record import RunRecord

JOBS_FILE = "training_jobs.json"


@dataclass(frozen=True)
class Job:
    name: str
    segment: int
    attempt: int
    """0 is the first one of its segment."""


class JobList:
    def __init__(self, record: RunRecord):
        self.path = record.path / JOBS_FILE

    def all(self) -> list[Job]:
        """Oldest first."""
        return [Job(**entry) for entry in json.loads(self.path.read_text())] if self.path.exists() else []

    def newest(self) -> Job | None:
        return next(reversed(self.all()), None)

    def add(self, job: Job) -> None:
        """Note a job that is about to be created; one that is noted already stays."""
        jobs = self.all()
        if job in jobs:
            return
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps([asdict(j) for j in [*jobs, job]], indent=2) + "\n")
        os.replace(part, self.path)
