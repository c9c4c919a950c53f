"""`local_job.json`: the request of the local target, as CreateTrainingJob is SageMaker's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from chimera_sm.planner.types import Plan
from chimera_train.config import decode, encode
from chimera_train.config.contract import CODE_CHANNEL, DEFAULT_ML_ROOT, GRACE_VARIABLE, RUN_ID_VARIABLE

JOB_FILE = "local_job.json"
REPAIRS = 2
"""Restarts after a broken host that the platform makes on its own, as SageMaker repairs a cluster."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """An input channel: the folder that hosts see as `<ml root>/input/data/<name>`."""

    location: Literal["stdlib", "local", "s3", "fsx"]
    uri: str | None
    """`local`: the folder."""
    path: str
    """Folder of the shards inside the channel."""
    vocab_size: int
    """`stdlib`: vocabulary of the tokenizer that is trained on it."""


@dataclass(frozen=True, kw_only=True)
class JobCheckpoint:
    storage: Literal["per_host", "shared"]
    path: str
    """Under the ml root, with the run's id filled in."""


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    run_id: str
    recipe_hash: str
    hosts: int
    workers_per_host: int
    entrypoint: tuple[str, ...]
    """As the container would be started; here `python3` is this interpreter and the ml root another folder."""
    environment: dict[str, str]
    channels: dict[str, Channel]
    checkpoint: JobCheckpoint
    grace_s: float
    max_attempts: int
    """Starts, after failures that are worth a retry, before the run is called failed; a resume counts anew."""
    num_steps: int
    schema_version: int = field(default=1)

    @property
    def host_names(self) -> list[str]:
        return [f"algo-{i}" for i in range(1, self.hosts + 1)]

    def to_bytes(self) -> bytes:
        return (json.dumps(encode(self), indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LocalJob:
        return decode(cls, json.loads(data))


def local_job(plan: Plan, run_id: str) -> LocalJob:
    """The job that a plan stands for. Reads nothing but the plan."""
    recipe = plan.recipe
    data = recipe.data
    return LocalJob(
        run_id=run_id,
        recipe_hash=plan.recipe_hash,
        hosts=plan.layout.hosts,
        workers_per_host=plan.layout.workers_per_host,
        entrypoint=("python3", "-u", f"{DEFAULT_ML_ROOT}/input/data/{CODE_CHANNEL}/launch.py"),
        environment={
            **recipe.target.environment,
            RUN_ID_VARIABLE: run_id,
            GRACE_VARIABLE: f"{recipe.target.grace_s:g}",
        },
        channels={
            data.channel: Channel(
                location=data.location,
                uri=data.uri,
                path=data.path,
                vocab_size=data.vocab_size or recipe.model.vocab_size,
            )
        },
        checkpoint=JobCheckpoint(
            storage=recipe.checkpoint.storage, path=recipe.checkpoint.path.replace("{run_id}", run_id)
        ),
        grace_s=recipe.target.grace_s,
        max_attempts=1 + REPAIRS + recipe.capacity.max_retries,
        num_steps=recipe.train.num_steps,
    )
