"""One worker's place in the job, and the process group that joins the workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from .config import ConfigError, LayoutConfig, Problem

START_TIMEOUT_S = 300.0
"""Least timeout of collectives until the first step is done: ranks load, compile and start at different speeds."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Worker:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def host(self) -> int:
        """Number of the node; ranks are numbered node by node."""
        return self.rank // self.local_world_size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def leads_host(self) -> bool:
        return self.local_rank == 0


def worker_from(environment: Mapping[str, str], layout: LayoutConfig) -> Worker:
    """Read torchrun's variables; without any of them, the worker is the only one.

    Raises ConfigError where they are incomplete or another job's than the plan's `layout`.
    """
    present = [name for name in VARIABLES if name in environment]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        rank, world_size, local_rank, local_world_size = 0, 1, 0, 1
    elif missing := [name for name in VARIABLES if name not in present]:
        raise ConfigError(
            [Problem("environment", f"{', '.join(missing)} not set", "start with torchrun, or set all as it does")]
        )
    else:
        rank, world_size, local_rank, local_world_size = (int(environment[name]) for name in VARIABLES[:4])
    if (world_size, local_world_size) != (layout.world_size, layout.workers_per_host):
        raise ConfigError(
            [
                Problem(
                    "layout",
                    f"planned for {layout.hosts} hosts × {layout.workers_per_host} workers, started as {world_size} "
                    f"workers, {local_world_size} on this host",
                    "plan again for these machines",
                )
            ]
        )
    if not torch.cuda.is_available():
        return Worker(rank, world_size, local_rank, local_world_size, torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            [Problem("layout.workers_per_host", f"{local_world_size}, but there are {torch.cuda.device_count()} GPUs")]
        )
    return Worker(rank, world_size, local_rank, local_world_size, torch.device("cuda", local_rank))


def start(worker: Worker, *, collective_timeout_s: float, deterministic: bool) -> None:
    """Choose the device and join the process group: NCCL on GPUs, gloo on CPUs, alone without any network."""
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // worker.local_world_size))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    alone = worker.world_size == 1
    dist.init_process_group(
        "nccl" if worker.device.type == "cuda" else "gloo",
        rank=worker.rank,
        world_size=worker.world_size,
        store=dist.HashStore() if alone else None,
        timeout=timedelta(seconds=max(START_TIMEOUT_S, collective_timeout_s)),
        device_id=worker.device if worker.device.type == "cuda" else None,
    )


def set_collective_timeout(groups: Sequence[dist.ProcessGroup], seconds: float) -> None:
    """Once all ranks run alike: a collective that takes longer is a hang."""
    for group in (dist.group.WORLD, *groups):
        _set_pg_timeout(timedelta(seconds=seconds), group)
