"""What a worker's exception means for the job: an exit code, and a report for the supervisor. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from typing import NoReturn

from . import flight_recorder
from .config import ConfigError, MlRoot
from .config.contract import ERROR_FILE_VARIABLE, EXIT_FAILED, EXIT_RETRY

RETRY_ERRNOS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTUNREACH}
"""A file system or a peer that went away. A full disk (ENOSPC) is not among them: it would be full again."""
RETRY_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Of torch.distributed: a peer, the network or the store."""
RETRY_WORDS = ("nccl", "cuda error", "gloo", "connection closed", "connection reset", "connection refused", "timed out")
"""In the message of a RuntimeError, which is all that torch's C++ side tells."""
FAIL_WORDS = ("out of memory", "device-side assert")
"""CUDA errors that come back: too much in memory, and an index out of range."""


def exit_code_of(error: BaseException) -> int:
    """EXIT_RETRY for hardware, network and hangs, EXIT_FAILED for all else.

    An error may say so itself by an attribute `exit_code`; else it is judged by type and message, and by those of the
    errors that it was raised from.
    """
    cause: BaseException | None = error
    while cause is not None:
        declared = getattr(cause, "exit_code", None)
        if declared is not None:
            return int(declared)
        if _is_transient(cause):
            return EXIT_RETRY
        cause = cause.__cause__
    return EXIT_FAILED


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in RETRY_ERRNOS
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    if any(words in text for words in FAIL_WORDS):
        return False
    return type(error).__name__ in RETRY_TYPES or any(words in text for words in RETRY_WORDS)


def leave(error: BaseException, rank: int) -> NoReturn:
    """Report the error and end this process at once.

    No clean-up: destroying a process group after an error waits for peers that wait for us, and so do exit handlers.
    """
    code = exit_code_of(error)
    details = "".join(traceback.format_exception(error))
    explained = getattr(error, "explains_itself", False)
    message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    print(f"error: {message}" if isinstance(error, ConfigError) else details, file=sys.stderr, flush=True)
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        # Where in our code a wrong recipe, a bad file or a diverged loss was found helps nobody; the log has it.
        frames = "" if explained else details.removesuffix("".join(traceback.format_exception_only(error)))
        report = {"rank": rank, "time": time.time(), "exit_code": code, "message": message, "traceback": frames}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(report, file)
    if code == EXIT_RETRY and (dump := flight_recorder.dump(MlRoot(), rank)):
        print(f"the last collectives of rank {rank} are in {dump}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
