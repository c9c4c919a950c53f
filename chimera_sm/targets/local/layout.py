"""Folders of a local run: each simulated host's /opt/ml, and what stands for S3 and FSx."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from chimera_sm.errors import UsageError
from chimera_sm.runs.record import RunRecord
from chimera_train.config import MlRoot
from chimera_train.config.contract import CODE_CHANNEL, MANIFEST_FILE, RECIPE_FILE

from .job import JOB_FILE, LocalJob

SHARED_EXAMPLE = "input/data/fsx/checkpoints/{run_id}"


class RunFolder:
    """`runs/<run id>` of a local run."""

    def __init__(self, path: Path):
        self.path = path

    def job(self) -> LocalJob:
        """What was launched, or resumed with another recipe. Raises UsageError for a file that is gone or damaged."""
        file = RunRecord(self.path).artifacts / JOB_FILE
        try:
            return LocalJob.from_bytes(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the record of run {self.path.name} cannot be read: {file}: {str(error).splitlines()[0]}"
            ) from None

    def ml(self, host: str) -> MlRoot:
        return MlRoot(self.path / "hosts" / host / "ml")

    def host_names(self) -> list[str]:
        """Hosts with a log, of whatever recipe of the run, in their order, or those that will have one."""
        logs = {path.stem for path in (self.path / "logs").glob("algo-*.log")}
        return sorted(logs | set(self.job().host_names), key=lambda name: int(name.removeprefix("algo-")))

    def log(self, host: str) -> Path:
        return self.path / "logs" / f"{host}.log"

    @property
    def driver_log(self) -> Path:
        return self.path / "driver.log"

    @property
    def store(self) -> Path:
        """What `CheckpointConfig.S3Uri` is on SageMaker."""
        return self.path / "s3" / "checkpoints"

    @property
    def fsx(self) -> Path:
        """A file system that every host mounts."""
        return self.path / "fsx"

    def checkpoints(self, job: LocalJob) -> Path:
        """Folder with the `step-…` folders of all hosts."""
        if job.checkpoint.storage == "shared":
            return self.fsx / _shared_parts(job)[1]
        return self.store / PurePosixPath(job.checkpoint.path).relative_to("checkpoints")

    def saved_step(self, job: LocalJob) -> int | None:
        """Step of the newest complete checkpoint, in the store or with a host, by its manifest: that is written last
        and deleted first."""
        folders = [self.checkpoints(job)]
        if job.checkpoint.storage == "per_host":
            folders += [self.ml(host).root / job.checkpoint.path for host in job.host_names]
        found = [file.parent.name for folder in folders for file in folder.glob(f"step-*/{MANIFEST_FILE}")]
        steps = [re.fullmatch(r"step-(\d+)(\.\d+)?", name) for name in found]
        return max((int(step[1]) for step in steps if step), default=None)


def lay_out(run: RunFolder, job: LocalJob, code: Mapping[str, bytes], channels: Mapping[str, Path]) -> None:
    """Make the folders of every host: code, channels and the configuration files of SageMaker."""
    (run.path / "logs").mkdir(parents=True, exist_ok=True)
    for host in job.host_names:
        ml = run.ml(host)
        for name, content in code.items():
            file = ml.channel(CODE_CHANNEL) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        for folder in (ml.config, ml.checkpoints.parent, ml.model, ml.output):
            folder.mkdir(parents=True, exist_ok=True)
        for channel, source in channels.items():
            _point(ml.channel(channel), source)
        if job.checkpoint.storage == "shared":
            link, inside = _shared_parts(job)
            (run.fsx / inside).mkdir(parents=True, exist_ok=True)
            _point(ml.root / link, run.fsx / (inside if link == job.checkpoint.path else "."))
        if not ml.checkpoints.is_symlink():
            ml.checkpoints.mkdir(exist_ok=True)
        _write_config(run, job, host)


def arrange(run: RunFolder, job: LocalJob) -> None:
    """Before a resume: give every host of `job` what the newest recipe says. Code and data stay those of the launch; a
    host that the launch had not gets a copy. Safe to repeat."""
    first = run.ml("algo-1")
    folder = first.channel(CODE_CHANNEL)
    code = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    code[RECIPE_FILE] = (RunRecord(run.path).artifacts / RECIPE_FILE).read_bytes()
    lay_out(run, job, code, {name: first.channel(name).resolve() for name in job.channels})


def _shared_parts(job: LocalJob) -> tuple[str, str]:
    """(what hosts see as a link into `fsx/`, the checkpoints' folder inside `fsx/`): a whole channel, if the path
    lies in one, else the folder itself."""
    parts = PurePosixPath(job.checkpoint.path).parts
    if parts[:2] == ("input", "data") and len(parts) > 3:
        return "/".join(parts[:3]), "/".join(parts[3:])
    return job.checkpoint.path, job.checkpoint.path


def check_checkpoint_path(job: LocalJob) -> str | None:
    """What is wrong with `checkpoint.path`, in words."""
    path = PurePosixPath(job.checkpoint.path)
    said = f"checkpoint.path={path}"
    if path.is_absolute() or ".." in path.parts:
        return f"{said} leaves the ml root"
    if job.checkpoint.storage == "per_host":
        if path.parts[:1] != ("checkpoints",):
            return f"{said} with checkpoint.storage=per_host: only checkpoints/ is kept and restored"
        return None
    if not path.parts:
        return f"{said} names no folder; take one in a channel of its own, e.g. {SHARED_EXAMPLE}"
    if path.parts[0] in ("model", "output"):
        return f"{said} lies in {path.parts[0]}/, which every host has for itself; take e.g. {SHARED_EXAMPLE}"
    if path.parts[0] == "input":
        if path.parts[:2] != ("input", "data") or len(path.parts) < 3:
            return f"{said} is or lies in what the platform writes itself; take a channel, e.g. {SHARED_EXAMPLE}"
        if path.parts[2] in job.channels:
            return f"{said} lies in the channel of the training data; take another channel, e.g. fsx"
        if path.parts[2] == CODE_CHANNEL:
            return f"{said} lies in the channel of the code; take another channel, e.g. fsx"
    return None


def _write_config(run: RunFolder, job: LocalJob, host: str) -> None:
    ml = run.ml(host)
    files = {
        # Sorted as text, as SageMaker's is.
        "resourceconfig.json": {
            "current_host": host,
            "hosts": sorted(job.host_names),
            "network_interface_name": "lo",
            "current_instance_type": "local",
            "current_group_name": "homogeneousCluster",
            "instance_groups": [
                {
                    "instance_group_name": "homogeneousCluster",
                    "instance_type": "local",
                    "hosts": sorted(job.host_names),
                }
            ],
        },
        "hyperparameters.json": {"run_id": job.run_id, "recipe_hash": job.recipe_hash},
        "inputdataconfig.json": {
            name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
            for name in (CODE_CHANNEL, *job.channels)
        },
        "checkpointconfig.json": {"LocalPath": str(ml.checkpoints), "S3Uri": run.store.as_uri()},
    }
    for name, content in files.items():
        (ml.config / name).write_text(json.dumps(content, indent=2) + "\n")


def _point(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise UsageError(f"{link} is in the way of a link to {target}")
    link.symlink_to(target.resolve(), target_is_directory=True)
