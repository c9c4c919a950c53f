"""Run a function, or train.py, as the ranks of a job on this machine, and report every rank's failure."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ranks are forked from a server that has imported torch already: importing it in each costs most of a test. Its
# environment is the one in which the first rank was started.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"])


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Any]:
    """`function(rank, *arguments)` on `world_size` gloo ranks; what each returned, in rank order.

    `function` is a module-level one. An exception on a rank comes back as (its type's name, its text), a killed process
    as its negative signal. No process is left behind.
    """
    return [
        outcome.exit_code if outcome.done is None else outcome.done.value
        for outcome in _run(world_size, function, arguments, environment or {}, timeout_s)
    ]


def run_distributed(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 180.0) -> Any:
    """`function(*arguments)` on `world_size` gloo ranks; a list of what each returned.

    Raises AssertionError with the traceback of every rank that failed, or the ranks that did not end in time. A
    segmentation fault gives a warning with the stacks and a second try: there is no native code here but torch's, which
    on gloo crashed once in some hundred thousand collectives and could not be made to again.
    """
    outcomes = _run(world_size, _without_rank, (function, *arguments), {}, timeout_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.exit_code == -signal.SIGSEGV:
            warnings.warn(f"rank {rank} had a segmentation fault:\n{outcome.stacks}", stacklevel=2)
            outcomes = _run(world_size, _without_rank, (function, *arguments), {}, timeout_s)
            break
    problems = []
    for rank, outcome in enumerate(outcomes):
        if outcome.done is None:
            problems.append(
                f"rank {rank}: exit code {outcome.exit_code}, or still running when the time was up\n{outcome.stacks}"
            )
        elif outcome.done.trace:
            problems.append(f"rank {rank}:\n{outcome.done.trace}")
    assert not problems, "\n".join(problems)
    return [outcome.done.value for outcome in outcomes if outcome.done is not None]


def _without_rank(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class _Done:
    value: Any
    trace: str
    """Of the exception; empty where the function returned."""


@dataclass(frozen=True)
class _Outcome:
    done: _Done | None
    """None: the process ended before it could say anything."""
    exit_code: int | None
    stacks: str
    """Of its threads, where a signal such as SIGSEGV ended it."""


def _run(
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    timeout_s: float,
) -> list[_Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(
                target=_rank_main, args=(function, rank, world_size, folder, arguments, environment), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        # One that fails may leave its peers waiting for it, so the others get some seconds more, not all the time.
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + 15)
                break
            time.sleep(0.01)
        outcomes = []
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            file = Path(folder, f"done-{rank}")
            done = pickle.loads(file.read_bytes()) if file.exists() else None
            crash = Path(folder, f"crash-{rank}")
            outcomes.append(_Outcome(done, process.exitcode, crash.read_text() if crash.exists() else ""))
        return outcomes


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    crash = open(f"{folder}/crash-{rank}", "w")  # noqa: SIM115 open for as long as the process may crash
    faulthandler.enable(crash)
    file = Path(folder, f"done-{rank}")
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        done = pickle.dumps(_Done(function(rank, *arguments), ""))
    except BaseException as error:
        file.write_bytes(pickle.dumps(_Done((type(error).__name__, str(error)), traceback.format_exc())))
        os._exit(1)  # a peer may be dead: destroying the group would wait for it
    file.write_bytes(done)
    dist.barrier()
    dist.destroy_process_group()


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
