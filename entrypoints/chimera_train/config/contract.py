"""The container contract: folders, environment variables, exit codes, file names. Read by both sides.

Folders and signals are SageMaker's (developer guide: "How Amazon SageMaker runs your training image", and the
model-train-storage page, as archived in June 2023). The local target lays out the same tree elsewhere and says where
in CHIMERA_ML_ROOT.
"""

from __future__ import annotations

import os
from pathlib import Path

ML_ROOT_VARIABLE = "CHIMERA_ML_ROOT"
DEFAULT_ML_ROOT = "/opt/ml"
RUN_ID_VARIABLE = "CHIMERA_RUN_ID"
"""Set by the launching side; every attempt of a run has the same."""
ATTEMPT_VARIABLE = "CHIMERA_ATTEMPT"
"""Counts starts of one run where the platform tells (1, 2, …); else unset."""
GRACE_VARIABLE = "CHIMERA_GRACE_S"
"""Seconds between SIGTERM and SIGKILL; SageMaker's `docker stop -t 120`."""
DEFAULT_GRACE_S = 120.0

FAULT_VARIABLE = "CHIMERA_FAULT"
"""A fault planted for a drill (`chimera_train.faults`)."""
WORKER_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""What launch.py sets for each worker; as `torchrun` does."""


def is_reserved_variable(name: str) -> bool:
    """Whether we set this variable of the container ourselves, so that a recipe's value would be lost or do harm."""
    ours = name.startswith("CHIMERA_") and name != FAULT_VARIABLE
    return ours or name in WORKER_VARIABLES or name == "TRAINING_JOB_NAME"


ERROR_FILE_VARIABLE = "CHIMERA_ERROR_FILE"
"""Where a worker writes {"rank", "time", "exit_code", "message", "traceback"} as JSON before it fails. The traceback is
without the message, and empty where the message says all."""

CODE_CHANNEL = "code"
MODEL_CHANNEL = "model"
"""Holds the weights that a run starts from, where a recipe has model.weights_uri."""
USER_FOLDER = "user"
"""Folder of the code bundle with the team's own code (`code.path`): on the workers' PYTHONPATH."""
RECIPE_FILE = "recipe.json"
MANIFEST_FILE = "manifest.json"
"""In a checkpoint's folder `step-<n>`: written last, deleted first, so that a folder with it is complete."""
FAILURE_LIMIT = 1024
"""Characters of `output/failure` that SageMaker shows as FailureReason."""

PROFILE_SIGNAL = "SIGUSR2"
"""To a worker or to its supervisor, which passes it on to its workers: profile the next `profiling.num_steps` steps."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
"""User code or configuration: a retry would fail again."""
EXIT_RETRY = 75
"""Hardware, network or a hang (EX_TEMPFAIL): worth a retry."""
EXIT_STOPPED = 143
"""Asked to stop, state saved (128 + SIGTERM)."""


class MlRoot:
    """The folders under /opt/ml, or under wherever CHIMERA_ML_ROOT points."""

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root or os.environ.get(ML_ROOT_VARIABLE) or DEFAULT_ML_ROOT)

    def channel(self, name: str) -> Path:
        return self.root / "input" / "data" / name

    @property
    def config(self) -> Path:
        return self.root / "input" / "config"

    @property
    def resource_config(self) -> Path:
        return self.config / "resourceconfig.json"

    @property
    def checkpoints(self) -> Path:
        """What SageMaker syncs to CheckpointConfig.S3Uri and restores, as the union, on every host."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def failure(self) -> Path:
        return self.output / "failure"

    @property
    def evaluations(self) -> Path:
        """Folder of the results on held-out data, one file a host."""
        return self.output / "data" / "evaluations"

    @property
    def profiles(self) -> Path:
        """Folder of the chrome traces."""
        return self.output / "data" / "profile"

    @property
    def flight_recorder(self) -> Path:
        """Folder of each rank's last collectives, written when a job hangs or loses a peer."""
        return self.output / "data" / "flight_recorder"

    @property
    def metrics(self) -> Path:
        """Folder of the metric files, one a host."""
        return self.output / "data" / "metrics"
