"""Runs the workers of one host from start to exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from chimera_train.config import ConfigError, RecipeFile, decode
from chimera_train.config.contract import (
    DEFAULT_GRACE_S,
    EXIT_FINISHED,
    EXIT_RETRY,
    EXIT_STOPPED,
    GRACE_VARIABLE,
    RECIPE_FILE,
    USER_FOLDER,
    MlRoot,
)

from .devices import check_accelerators, count_accelerators
from .errors import HostError, StopRequested
from .failure import WorkerEnd, describe, first_failure, write_failure, write_report
from .requirements import install_requirements
from .signals import Signals
from .topology import Topology, read_topology
from .worker import Worker, worker_environment

PEERS_GRACE_S = 10.0
"""What the other workers get between SIGTERM and SIGKILL after one has failed: they wait for it in a collective."""
SETTLE_S = 0.5
"""After a failure, time for its real cause to show: a worker that lost its peer may be reaped before the peer."""
DNS_PATIENCE_S = 900.0
"""Names of peers may resolve late; SageMaker's own toolkit retries as long."""


def run_host(code: Path, ml: MlRoot, environment: Mapping[str, str], signals: Signals) -> int:
    """Supervise this host's workers; returns the container's exit code. `code` holds train.py and recipe.json."""
    try:
        _prepare_folders(ml)
        recipe = _read_recipe(code / RECIPE_FILE)
        topology = read_topology(ml, environment)
        workers = recipe.layout.workers_per_host
        if len(topology.hosts) != recipe.layout.hosts:
            raise HostError(
                f"the recipe was planned for {recipe.layout.hosts} hosts, but {topology.source} has "
                f"{len(topology.hosts)}: {', '.join(topology.hosts)}"
            )
        check_accelerators(workers, count_accelerators(environment), expected=recipe.peak_tflops is not None)
        install_requirements(code, environment, signals)
        _resolve(topology.master_address, signals)
        return _run_workers(code / "train.py", ml, with_user_code(code, environment), signals, topology, workers)
    except StopRequested:
        print("chimera: asked to stop before the workers were started", flush=True)
        return EXIT_STOPPED
    except HostError as error:
        print(f"chimera: {error}", file=sys.stderr, flush=True)
        write_failure(ml.failure, str(error))
        return error.exit_code


def with_user_code(code: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the team's own folder of the bundle, where there is one, first on PYTHONPATH."""
    user = code / USER_FOLDER
    if not user.is_dir():
        return dict(environment)
    path = [str(user), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def _prepare_folders(ml: MlRoot) -> None:
    try:
        for folder in (ml.output, _logs(ml), ml.metrics, ml.checkpoints, ml.model):
            folder.mkdir(parents=True, exist_ok=True)
        for earlier in (ml.failure, _report(ml)):  # of an attempt on the same disk
            earlier.unlink(missing_ok=True)
    except OSError as error:
        raise SystemExit(f"chimera: cannot write under {ml.root} (CHIMERA_ML_ROOT): {error}") from error


def _logs(ml: MlRoot) -> Path:
    return ml.output / "data" / "logs"


def _report(ml: MlRoot) -> Path:
    return _logs(ml) / "failure.json"


def _read_recipe(file: Path) -> RecipeFile:
    try:
        return decode(RecipeFile, json.loads(file.read_text()))
    except OSError as error:
        raise HostError(f"{file}: {error.strerror}; the bundle is incomplete") from error
    except (ConfigError, ValueError) as error:
        raise HostError(f"{file} is no valid recipe: {error}") from error


def _resolve(address: str, signals: Signals) -> None:
    """Wait until `address` resolves."""
    deadline = time.monotonic() + DNS_PATIENCE_S
    delay = 1.0
    while True:
        if signals.stop_requested:
            raise StopRequested
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() + delay > deadline:
                raise HostError(
                    f"the first host {address!r} did not resolve within {DNS_PATIENCE_S / 60:.0f} minutes: {error}",
                    EXIT_RETRY,
                ) from error
            print(f"chimera: {address!r} does not resolve yet ({error}); again in {delay:.0f} s", flush=True)
        signals.wait(delay)
        delay = min(30.0, delay * 2)


def _run_workers(
    script: Path, ml: MlRoot, environment: Mapping[str, str], signals: Signals, topology: Topology, workers: int
) -> int:
    grace = float(environment.get(GRACE_VARIABLE) or DEFAULT_GRACE_S)
    first = topology.node_rank * workers
    print(
        f"chimera: host {topology.current_host} ({topology.node_rank + 1} of {len(topology.hosts)}, {topology.source}) "
        f"starts ranks {first} to {first + workers - 1} of {workers * len(topology.hosts)}, "
        f"master {topology.master_address}:{topology.master_port}",
        flush=True,
    )
    scratch = Path(tempfile.mkdtemp(prefix="chimera-"))
    try:
        started = [
            Worker(
                script,
                local_rank,
                worker_environment(topology, local_rank, workers, scratch / f"error-{local_rank}.json", environment),
            )
            for local_rank in range(workers)
        ]
        # Only now: starting a thread before the last fork could leave a lock held in the child.
        for worker in started:
            worker.pump(_logs(ml) / f"rank-{worker.rank}.log")
        supervisor = Supervisor(started, signals, grace_s=usable_grace(grace))
        code = supervisor.run()
        if supervisor.failure is not None:
            text = describe(supervisor.failure, topology.current_host, _last_lines(started, supervisor.failure))
            print(f"chimera: {text.splitlines()[0]}", file=sys.stderr, flush=True)
            write_failure(ml.failure, text)
            write_report(_report(ml), supervisor.failure)
        return code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def usable_grace(grace_s: float) -> float:
    """What workers get of the platform's grace period: all but what ending and telling it takes."""
    return grace_s - min(5.0, 0.1 * grace_s)


def _last_lines(workers: Sequence[Worker], failure: WorkerEnd) -> list[str]:
    return next(list(worker.last_lines) for worker in workers if worker.rank == failure.rank)


class Supervisor:
    """Waits for the workers; forwards a stop; ends the others when one fails."""

    def __init__(
        self, workers: Sequence[Worker], signals: Signals, *, grace_s: float, peers_grace_s: float = PEERS_GRACE_S
    ):
        self._workers = {worker.pid: worker for worker in workers}
        self._signals = signals
        self._grace_s = grace_s
        self._peers_grace_s = peers_grace_s
        self._kill_at: float | None = None
        self.asked_to_stop = False
        self.failure: WorkerEnd | None = None
        """What the host failed of; None where it finished or stopped."""

    def run(self) -> int:
        """Blocks until every worker has ended; returns the exit code."""
        while self._running():
            self._signals.wait(0.1 if self._kill_at is not None else 1.0)
            self._reap()
            if self._signals.stop_requested or any(e.code == EXIT_STOPPED for e in self._ends()):
                self._forward_stop()
            if self._signals.profile_requested:
                self._signals.profile_requested = False
                for worker in self._running():
                    worker.request_profile()
            if first_failure(self._ends(), self.asked_to_stop):
                self._end_after_failure()
                break
            if self._kill_at is not None and time.monotonic() >= self._kill_at and self._running():
                self._end_after_grace()
                break
        for worker in self._workers.values():
            worker.kill_group()  # what a worker left behind
            worker.drain(2.0)
        if self.failure is not None:
            return self.failure.host_exit(self.asked_to_stop)
        stopped = any(end.host_exit(self.asked_to_stop) == EXIT_STOPPED for end in self._ends())
        return EXIT_STOPPED if stopped else EXIT_FINISHED

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.end is None]

    def _ends(self) -> list[WorkerEnd]:
        return [worker.end for worker in self._workers.values() if worker.end is not None]

    def _forward_stop(self) -> None:
        """Once: pass SIGTERM on and start the grace period."""
        if self.asked_to_stop:
            return
        self.asked_to_stop = True
        self._kill_at = time.monotonic() + self._grace_s
        print(f"chimera: asked to stop; workers have {self._grace_s:.0f} s to save", flush=True)
        for worker in self._running():
            worker.terminate()

    def _end_after_failure(self) -> None:
        """Find the cause, then end the others: they can do nothing but wait for the one that failed."""
        self._wait_for_all(SETTLE_S)
        self.failure = first_failure(self._ends(), self.asked_to_stop)
        for worker in self._running():
            worker.terminate()
        self._wait_for_all(self._peers_grace_s)
        self._kill_rest()

    def _end_after_grace(self) -> None:
        late = [worker.rank for worker in self._running()]
        ranks = ", ".join(str(rank) for rank in late)
        self._kill_rest()
        self.failure = WorkerEnd(
            late[0],
            EXIT_RETRY,
            time.time(),
            f"asked to stop, but rank(s) {ranks} had not saved after {self._grace_s:.0f} s",
        )

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            self._signals.wait(min(0.1, deadline - time.monotonic()))
            self._reap()

    def _kill_rest(self) -> None:
        for worker in self._running():
            worker.kill_group()
        self._wait_for_all(5.0)
        for worker in self._running():  # stuck in the kernel (a dead file system, a broken driver)
            worker.ended(-signal.SIGKILL)

    def _reap(self) -> None:
        """Take every ended child: the workers, and, as PID 1, whatever was left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                self._workers[pid].ended(os.waitstatus_to_exitcode(status))
