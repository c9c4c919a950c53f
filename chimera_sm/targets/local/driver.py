"""The process that drives a local run in the background: `python -m chimera_sm.targets.local.driver <run folder>`.

It does what SageMaker does around the containers: starts one launch.py a host, syncs the checkpoint folders, restarts
after failures that are worth it, and says in state.json how the run does. The command returns once that is written;
the driver itself goes on, detached.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from chimera_sm.errors import UsageError
from chimera_sm.runs.record import LOCK_FILE, RunRecord
from chimera_train.config.contract import (
    ATTEMPT_VARIABLE,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_RETRY,
    EXIT_STOPPED,
    ML_ROOT_VARIABLE,
)

from .environment import free_port, host_environment, visible_devices
from .layout import RunFolder
from .process import ProcessId, signal_process
from .state import HostState, LocalState, read_state, write_state
from .sync import CheckpointSync

PEERS_GRACE_S = 15.0
"""What other hosts get to end after one has failed."""
POLL_S = 0.2
SYNC_S = 1.0
DRIVER_LOCK_FILE = "driver.lock"
HELD = "another driver is running this run"
EXIT_HELD = 3
"""Of the command: another driver is running this run."""


class Driver:
    """Runs the hosts of one run until it has ended."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._job = run.job()
        self._recipe = RunRecord(run.path).current
        before = read_state(run.path)
        self._leftovers = [h.process for h in before.hosts.values() if h.process] if before else []
        self._state = LocalState(
            state="provisioning",
            driver=ProcessId.of(os.getpid()),
            attempt=before.attempt if before else 0,
            hosts=before.hosts if before else {},
            saved_step=before.saved_step if before else None,
        )
        self._stop_requested = False
        folders = {h: run.ml(h).checkpoints for h in self._job.host_names if not run.ml(h).checkpoints.is_symlink()}
        self._sync = CheckpointSync(folders, run.store)
        self._sync_problem = ""
        self._next_sync = 0.0
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._signalled: set[str] = set()
        """Hosts of this attempt that ran when the driver asked them to end."""
        self._devices = visible_devices(self._job)

    def announce(self) -> None:
        """Write the first state: from here on every other process knows of this driver."""
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        write_state(self._run.path, self._state)

    def run(self) -> None:
        """Attempt after attempt, until the run has ended."""
        try:
            self._attempts()
        except OSError as error:  # a full disk, as a rule: nothing below can go on without it
            self._give_up(error)

    def _attempts(self) -> None:
        self._end_leftovers()
        last_attempt = self._state.attempt + self._job.max_attempts
        while True:
            self._update(state="downloading", attempt=self._state.attempt + 1)
            restored = self._restore()
            self._say(f"attempt {self._state.attempt}: {restored} checkpoint files restored on every host")
            if self._state.saved_step is not None and self._run.saved_step(self._job) is None:
                self._update(state="failed", reason=self._history_gone(), exit_code=EXIT_FAILED)
                return
            if self._stop_requested:
                self._update(state="stopped", reason="stopped before the hosts were started", exit_code=EXIT_STOPPED)
                return
            hosts = self._hosts = {}
            self._signalled.clear()
            self._start_hosts()
            self._update(state="running", reason="", hosts=self._host_states(hosts))
            self._watch(hosts)
            self._update(state="uploading", hosts=self._host_states(hosts))
            self._scan(settle_s=0.0)
            codes = {name: process.returncode for name, process in hosts.items()}
            self._say(f"attempt {self._state.attempt} ended: {codes}")
            state, code, reason = self._judge(codes)
            if state == "restarting" and self._state.attempt >= last_attempt:
                state, reason = "failed", f"gave up after {self._job.max_attempts} attempts: {reason}"
            if state == "failed" and self._withdraw_untried():
                reason += (
                    ". No step was made with the values that this resume changed, so they are taken back: "
                    f"`chimera_sm resume {self._run.path.name}` goes on with the recipe before them"
                )
            self._update(state=state, exit_code=code if state != "restarting" else None, reason=reason)
            if state != "restarting":
                return

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def _start_hosts(self) -> None:
        port = free_port()
        for index, name in enumerate(self._job.host_names):
            ml = self._run.ml(name)
            environment = host_environment(self._job, index, port, self._devices)
            environment |= {ML_ROOT_VARIABLE: str(ml.root), ATTEMPT_VARIABLE: str(self._state.attempt)}
            with self._run.log(name).open("ab") as log:
                log.write(f"--- {name}: attempt {self._state.attempt}\n".encode())
                log.flush()
                self._hosts[name] = subprocess.Popen(
                    self._command(ml.root),
                    cwd=ml.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def _command(self, root: Path) -> list[str]:
        """The entry point, with this interpreter and this host's folder."""
        _, *arguments = self._job.entrypoint
        return [sys.executable, *(a.replace("/opt/ml", str(root)) for a in arguments)]

    def _watch(self, hosts: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Until every host has ended: sync, pass a stop on, end the others when one has failed."""
        kill_at: float | None = None
        stopping = False
        while None in (codes := [process.poll() for process in hosts.values()]):
            now = time.monotonic()
            ended = [code for code in codes if code is not None]
            failed = any(self._is_failure(code) for code in ended)
            if (self._stop_requested or EXIT_STOPPED in ended) and not stopping:
                stopping = True
                kill_at = now + self._job.grace_s
                self._update(reason=f"stopping; the hosts have {self._job.grace_s:g} s to save")
                self._signal_all(signal.SIGTERM)
            if failed and (kill_at is None or kill_at > now + PEERS_GRACE_S):
                kill_at = now + PEERS_GRACE_S
                self._signal_all(signal.SIGTERM)
            if kill_at is not None and now >= kill_at:
                self._signal_all(signal.SIGKILL)
            if now >= self._next_sync:
                self._scan()
                self._next_sync = time.monotonic() + SYNC_S
            time.sleep(POLL_S)

    def _signal_all(self, number: int) -> None:
        for name, process in self._hosts.items():
            if process.poll() is None:
                process.send_signal(number)
                self._signalled.add(name)

    def _judge(self, codes: Mapping[str, int]) -> tuple[str, int, str]:
        """(state, exit code, reason) that the hosts' exit codes make."""
        if all(code == EXIT_FINISHED for code in codes.values()):
            return "completed", EXIT_FINISHED, self._sync_problem
        failed = {name: code for name, code in codes.items() if self._is_failure(code)}
        if not failed:
            return "stopped", EXIT_STOPPED, self._sync_problem or "state saved"
        name = min(failed, key=lambda n: self._cause_order(n, failed[n]))
        reason = "; ".join(filter(None, (self._failure_of(name, failed[name]), self._sync_problem)))
        if EXIT_FAILED in failed.values():
            return "failed", EXIT_FAILED, reason
        if self._stop_requested:
            return "stopped", EXIT_RETRY, f"not all state was saved: {reason}"
        return "restarting", EXIT_RETRY, reason

    def _withdraw_untried(self) -> bool:
        """Take the recipe of this start back if a resume brought it and no step has been made with it: whatever stands
        in its way would stand in the way of every later start."""
        if self._recipe == self._run.path:
            return False
        started = (self._recipe / LOCK_FILE).stat().st_mtime_ns
        rows = self._run.ml(self._job.host_names[0]).metrics.glob("*.jsonl")
        if any(file.stat().st_mtime_ns > started for file in rows):
            return False
        RunRecord(self._run.path).withdraw(self._recipe)
        return True

    def _is_failure(self, code: int) -> bool:
        # A launch.py that was still starting had no handler for SIGTERM yet, and nothing to save.
        stopped_early = self._stop_requested and code == -signal.SIGTERM
        return code not in (EXIT_FINISHED, EXIT_STOPPED) and not stopped_early

    def _cause_order(self, name: str, code: int) -> tuple[bool, bool, bool, float]:
        """Sorts the host that explains the others first: a worker that lost its peer leaves with EXIT_RETRY, so any
        other end counts more, and among equals the earliest (`supervisor.failure.first_failure` between hosts). A
        host that the driver's own signal killed explains nothing."""
        killed_here = code < 0 and name in self._signalled
        try:
            report = json.loads((self._run.ml(name).output / "data" / "logs" / "failure.json").read_bytes())
            return code != EXIT_FAILED, killed_here, report["code"] == EXIT_RETRY, report["time"]
        except (OSError, ValueError, KeyError):  # it failed before its workers did, or launch.py itself was killed
            return code != EXIT_FAILED, killed_here, code == EXIT_RETRY, 0.0

    def _failure_of(self, name: str, code: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._run.ml(name).failure.read_text()
        if code < 0:
            return f"launch.py of {name} was killed by signal {-code}"
        return f"{name} left with exit code {code}"

    def _restore(self) -> int:
        self._note(self._sync.gather())
        return self._sync.restore()

    def _scan(self, **settle: float) -> None:
        self._note(self._sync.scan(**settle))

    def _note(self, problems: list[str]) -> None:
        self._sync_problem = "; ".join(problems[:3])
        for problem in problems:
            self._say(problem)
        step = self._run.saved_step(self._job)
        if step is not None and step != self._state.saved_step:
            self._state = replace(self._state, saved_step=step)
            write_state(self._run.path, self._state)

    def _history_gone(self) -> str:
        return (
            f"the history of this run is gone: it had saved step {self._state.saved_step}, and no complete checkpoint "
            f"is left in {self._run.checkpoints(self._job)}; put it back and resume, or launch a new run"
        )

    def _give_up(self, error: OSError) -> None:
        """Let the hosts save, and end the run with the cause."""
        cause = ": ".join(filter(None, (error.strerror or str(error), error.filename)))
        self._say(f"cannot go on: {cause}")
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._job.grace_s
        while any(p.poll() is None for p in self._hosts.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._signal_all(signal.SIGKILL)
        for process in self._hosts.values():
            process.wait()
        kept = "no complete checkpoint is left"
        with contextlib.suppress(OSError):
            self._scan(settle_s=0.0)
        if (step := self._run.saved_step(self._job)) is not None:
            kept = f"the checkpoint of step {step} is kept"
        reason = f"the driver could not go on: {cause}; {kept}"
        try:
            self._update(state="failed", reason=reason, exit_code=EXIT_RETRY, hosts=self._host_states(self._hosts))
        except OSError as again:  # then a status finds the driver gone
            self._say(f"and could not say so in the run's state: {again}")

    def _end_leftovers(self) -> None:
        """Hosts of a driver that died may still be saving: they get their grace period, then they are killed."""
        deadline = time.monotonic() + self._job.grace_s
        for process in self._leftovers:
            if signal_process(process, signal.SIGTERM):
                self._say(f"waiting for process {process.pid} of an earlier driver to save")
        while any(process.alive for process in self._leftovers) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in self._leftovers:
            signal_process(process, signal.SIGKILL)

    def _update(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        write_state(self._run.path, self._state)
        self._say(f"state: {self._state.state}" + (f" ({self._state.reason})" if self._state.reason else ""))

    def _host_states(self, hosts: Mapping[str, subprocess.Popen[bytes]]) -> dict[str, HostState]:
        return {name: HostState(process=ProcessId.of(p.pid), exit_code=p.returncode) for name, p in hosts.items()}

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the log of a run on a full disk
            print(time.strftime("%H:%M:%S"), text, flush=True)


def lock(run: RunFolder) -> IO[str] | None:
    """Held for a driver's life: a run has one driver. None where another holds it."""
    file = (run.path / DRIVER_LOCK_FILE).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def main(arguments: list[str]) -> int:
    """Start the driver; returns once it has written its state (0), or says why it did not (1; EXIT_HELD)."""
    (folder,) = arguments
    run = RunFolder(Path(folder).resolve())
    read, write = os.pipe()
    if os.fork() > 0:
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        if answer != "ready":
            print(answer or f"the driver did not start; see {run.driver_log}", file=sys.stderr)
            return EXIT_HELD if answer == HELD else 1
        return 0
    os.close(read)
    os.setsid()
    with os.fdopen(write, "w") as pipe:
        try:
            held = lock(run)
            if held is None:
                pipe.write(HELD)
                return EXIT_HELD
            _log_to(run.driver_log)
            driver = Driver(run)
            driver.announce()
        except (OSError, UsageError) as error:
            pipe.write(str(error))
            return 1
        pipe.write("ready")
    driver.run()
    return 0


def _log_to(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
