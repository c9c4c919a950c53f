"""One worker process: its environment, its start, its output and its end."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from chimera_train.config.contract import ERROR_FILE_VARIABLE, PROFILE_SIGNAL

from .failure import WorkerEnd, read_error_file
from .topology import Topology

LAST_LINES = 15
_PR_SET_PDEATHSIG = 1
_output_lock = threading.Lock()


def worker_environment(
    topology: Topology, local_rank: int, workers: int, error_file: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """`base` with torchrun's variables, and defaults for what the user has not set."""
    env = dict(base)
    env.update(
        RANK=str(topology.node_rank * workers + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(len(topology.hosts) * workers),
        LOCAL_WORLD_SIZE=str(workers),
        NODE_RANK=str(topology.node_rank),
        GROUP_RANK=str(topology.node_rank),
        GROUP_WORLD_SIZE=str(len(topology.hosts)),
        MASTER_ADDR=topology.master_address,
        MASTER_PORT=str(topology.master_port),
    )
    env[ERROR_FILE_VARIABLE] = str(error_file)
    # Containers on different hosts may report the same host name; NCCL would take them for one machine.
    env.setdefault("NCCL_HOSTID", topology.current_host)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.setdefault("OMP_NUM_THREADS", str(max(1, _cpus() // workers)))
    if topology.interface and topology.interface in (name for _, name in socket.if_nameindex()):
        env.setdefault("NCCL_SOCKET_IFNAME", topology.interface)
        env.setdefault("GLOO_SOCKET_IFNAME", topology.interface)
    return env


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A running `train.py`. Leads a process group of its own, so that its children can be ended with it."""

    def __init__(self, script: Path, local_rank: int, env: Mapping[str, str]):
        self.rank = int(env["RANK"])
        self.local_rank = local_rank
        self.error_file = Path(env[ERROR_FILE_VARIABLE])
        self.end: WorkerEnd | None = None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(script)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_before_exec,
        )
        self._pump: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def pump(self, log_file: Path) -> None:
        """Copy the output, line by line, to `log_file` and to our own output; call once all workers are started."""
        self._pump = threading.Thread(target=self._copy_output, args=(log_file,), daemon=True)
        self._pump.start()

    def ended(self, code: int) -> None:
        """Take the status that the supervisor reaped."""
        self._process.returncode = code
        self.end = read_error_file(self.error_file, WorkerEnd(self.rank, code, time.time()))

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def request_profile(self) -> None:
        self._send(signal.Signals[PROFILE_SIGNAL])

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def drain(self, timeout_s: float) -> None:
        """Wait for the rest of the output."""
        if self._pump is not None:
            self._pump.join(timeout_s)

    def _copy_output(self, log_file: Path) -> None:
        # The host's first worker prints plain lines: metric patterns are matched against them.
        prefix = b"" if self.local_rank == 0 else f"[rank {self.rank}] ".encode()
        stream = self._process.stdout
        assert stream is not None
        log: BinaryIO | None = None
        try:
            log = log_file.open("ab", buffering=0)
        except OSError as error:
            _print(f"chimera: no log file {log_file}: {error}\n".encode())
        for line in stream:
            self.last_lines.append(line.decode(errors="replace"))
            if log is not None:
                try:
                    log.write(line)
                except OSError as error:  # a full disk must not stop the training
                    _print(f"chimera: {log_file} ends here: {error}\n".encode())
                    log = None
            _print(prefix + line)


def _print(line: bytes) -> None:
    with _output_lock, contextlib.suppress(OSError, ValueError):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def _before_exec() -> None:
    """In the child: a request for a profile that comes before the worker listens is lost, and does not kill it."""
    signal.signal(signal.Signals[PROFILE_SIGNAL], signal.SIG_IGN)
    if _libc is not None:
        _die_with_parent()


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """In the child, before exec: Linux kills it when the supervisor dies, however that dies."""
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
