"""A worker's place in the job, its signals and its errors: what needs no second process."""

import errno
import json
import os
import signal

import pytest
import torch

from chimera_train.checkpoint import CheckpointError
from chimera_train.config import ConfigError, LayoutConfig, Problem
from chimera_train.data.errors import DataError
from chimera_train.distributed import worker_from
from chimera_train.signals import SIGNALS, StopRequest
from chimera_train.step import NotFinite
from chimera_train.worker_errors import exit_code_of, leave

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


@pytest.mark.parametrize(
    ("error", "message", "frames"),
    [
        (ConfigError([Problem("train.num_steps", "0 is not positive")]), "train.num_steps: 0 is not positive", False),
        (DataError("x.bin is damaged", "copy it again"), "DataError: x.bin is damaged (fix: copy it again)", False),
        (CheckpointError("step-3 was not saved"), "CheckpointError: step-3 was not saved", False),
        (NotFinite("step 1: loss=nan"), "NotFinite: step 1: loss=nan", False),
        (ValueError("shapes do not match"), "ValueError: shapes do not match", True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_explains_itself_is_told_without_a_traceback(error, message, frames, tmp_path, monkeypatch, capfd):
    def exit_with(code):
        raise SystemExit(code)

    monkeypatch.setenv("CHIMERA_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "_exit", exit_with)
    try:
        raise error
    except Exception as caught:
        with pytest.raises(SystemExit):
            leave(caught, rank=0)
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"] == message
    assert bool(report["traceback"]) is frames
    assert "shapes do not match" not in report["traceback"].split("\n")[-1]
    assert message.partition(": ")[2] in capfd.readouterr().err
