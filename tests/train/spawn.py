"""Run a function, or train.py, as the ranks of a job on this machine, and report every rank's failure."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 180.0) -> list[Any]:
    """`fn(*args)` on `world_size` gloo processes; returns what each rank returned.

    `fn` is a module-level function; torch's process group is there when it is called. Raises AssertionError with
    the traceback of every rank that failed, or the ranks that did not end in time; no process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        # One that fails leaves its peers waiting for it, so the others get a few seconds more, not all the time.
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.02)
        problems = []
        for rank, process in enumerate(processes):
            if process.is_alive():
                process.kill()
                problems.append(f"rank {rank}: still running when the time was up")
            process.join()
            error = Path(folder, f"error-{rank}")
            if error.exists():
                problems.append(f"rank {rank}:\n{error.read_text()}")
            elif process.exitcode not in (0, -9):
                problems.append(f"rank {rank}: exit code {process.exitcode}")
        assert not problems, "\n".join(problems)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result = fn(*args)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_train(
    root: Path, recipe: Path, *, hosts: int = 1, workers_per_host: int = 1, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start train.py, one process a rank, all under the ml root `root`; stdout and stderr are one pipe each.

    `env` adds to the environment. End them with `finish`.
    """
    port, world_size = str(free_port()), hosts * workers_per_host
    processes = []
    for rank in range(world_size):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % workers_per_host),
            "LOCAL_WORLD_SIZE": str(workers_per_host),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "CHIMERA_ML_ROOT": str(root),
            "CHIMERA_RECIPE": str(recipe),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-u", str(ENTRYPOINTS / "train.py")],
                env={**os.environ, **place, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]], *, timeout_s: float = 120.0) -> tuple[list[int], list[str]]:
    """Wait for all; returns exit codes and outputs by rank. Kills what is left when the time is up."""
    deadline = time.monotonic() + timeout_s
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], outputs
