"""A worker's place in the job, its signals and its errors: what needs no second process."""

import errno
import os
import signal

import pytest
import torch

from chimera_train.config import ConfigError, LayoutConfig, Problem
from chimera_train.distributed import worker_from
from chimera_train.signals import SIGNALS, StopRequest
from chimera_train.worker_errors import exit_code_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "algo-1",
    "MASTER_PORT": "7777",
}


def test_place_of_a_worker():
    worker = worker_from(TORCHRUN, LayoutConfig(hosts=2, workers_per_host=4))
    assert (worker.rank, worker.world_size, worker.host) == (5, 8, 1)
    assert not worker.is_first
    assert not worker.leads_host


def test_no_environment_is_one_worker():
    worker = worker_from({"PATH": "/bin"}, LayoutConfig(hosts=1, workers_per_host=1))
    assert worker.is_first
    assert worker.leads_host


@pytest.mark.parametrize("missing", ["LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK"])
def test_half_an_environment_names_what_is_missing(missing):
    environment = {k: v for k, v in TORCHRUN.items() if k != missing}
    with pytest.raises(ConfigError, match=f"environment: {missing} not set"):
        worker_from(environment, LayoutConfig(hosts=2, workers_per_host=4))


@pytest.mark.parametrize(("hosts", "workers"), [(8, 1), (1, 8), (2, 8)])
def test_other_machines_than_planned_are_refused(hosts, workers):
    with pytest.raises(ConfigError, match=f"planned for {hosts} hosts × {workers} workers, started as 8 workers, 4 on"):
        worker_from(TORCHRUN, LayoutConfig(hosts=hosts, workers_per_host=workers))


def test_signals_only_set_a_flag():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            stop = StopRequest().install()
            assert not stop.requested
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


class Declared(RuntimeError):
    exit_code = 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError([Problem("train.num_steps", "0 is not positive")]), 1),
        (ValueError("connection reset is only a word here"), 1),
        (FileNotFoundError(errno.ENOENT, "no such shard"), 1),
        (OSError(errno.ENOSPC, "no space left on device"), 1),
        (OSError(errno.EIO, "input/output error"), 75),
        (OSError(errno.ESTALE, "stale file handle"), 75),
        (ConnectionResetError("peer"), 75),
        (TimeoutError("store"), 75),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 1),
        (RuntimeError("shapes do not match"), 1),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"), 75),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), 75),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), 75),
        (torch.distributed.DistStoreError("wait timeout after 300000ms"), 75),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 75),
        (RuntimeError("CUDA error: device-side assert triggered"), 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1),
        (Declared("connection reset"), 1),
        (chained(RuntimeError("the reading thread failed"), OSError(errno.EIO, "i/o")), 75),
        (chained(RuntimeError("the reading thread failed"), ValueError("corrupt")), 1),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_exit_codes(error, code):
    assert exit_code_of(error) == code
