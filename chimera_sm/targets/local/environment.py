"""The environment of a simulated host's container."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import chimera_train

from .job import LocalJob


def import_path() -> list[str]:
    """Where this process has our packages from: what a driver needs on its path, and a host must not have."""
    launching_side, container_side = Path(__file__).resolve().parents[3], Path(chimera_train.__path__[0]).parent
    return list(dict.fromkeys([str(launching_side), str(container_side)]))


def driver_environment() -> dict[str, str]:
    """The caller's environment, with our packages found first."""
    path = [*import_path(), *_python_path()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def _python_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def host_environment(job: LocalJob, index: int, port: int, devices: list[str] | None) -> dict[str, str]:
    """Of host `index` (from 0): the caller's variables, SageMaker's, and the recipe's, the last of which win.

    The bundle's `chimera_train` stands beside launch.py and is the one that is imported: ours is not on the path.
    """
    environment = {**os.environ}
    ours = import_path()
    environment["PYTHONPATH"] = os.pathsep.join(p for p in _python_path() if p not in ours)
    cpus = os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cpus // (job.hosts * job.workers_per_host))))
    if devices is not None:
        mine = devices[index * job.workers_per_host : (index + 1) * job.workers_per_host]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return environment | {
        "TRAINING_JOB_NAME": job.run_id,
        "CHIMERA_MASTER_ADDR": "127.0.0.1",
        "CHIMERA_MASTER_PORT": str(port),
        "CHIMERA_PARENT_PID": str(os.getpid()),
        "CHIMERA_REQUIREMENTS": "check",
        **job.environment,
    }


def visible_devices(job: LocalJob) -> list[str] | None:
    """GPUs of this machine to be dealt out among the hosts; [] where they are too few, which leaves the CPU to all;
    None where there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [d.strip() for d in visible.split(",") if d.strip() not in ("", "-1")]
    else:
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return None
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout
        devices = [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    return devices if len(devices) >= job.hosts * job.workers_per_host else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
